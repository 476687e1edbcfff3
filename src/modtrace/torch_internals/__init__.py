"""Holds every private name of PyTorch that modtrace uses, by subject, with what is lost without each."""
