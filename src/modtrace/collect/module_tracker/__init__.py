"""`ModuleTracker`: the modules that run now, and the user's hooks around every forward and backward."""
