"""`track()`: activations and gradients at the outputs of modules, kept or transformed for the user."""
