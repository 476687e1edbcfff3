"""How a recording rests on disk: a folder of Arrow streams that is readable whenever its writer dies."""
