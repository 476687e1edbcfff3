"""A package whose `train` is run by `python -m package.train`."""
