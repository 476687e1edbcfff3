"""Every private name of PyTorch that modtrace uses, by what the names are about, with what is lost without each."""
