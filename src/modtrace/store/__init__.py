"""Stores recordings on disk, as a folder of Arrow streams that stays readable whenever its writer is killed."""
