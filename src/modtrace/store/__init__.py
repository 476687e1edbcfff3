"""Stores recordings on disk: a folder of Arrow streams that stays readable whenever its writer dies."""
