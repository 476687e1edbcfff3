"""`track()`: keeps or transforms the outputs of modules and their gradients for the user."""
