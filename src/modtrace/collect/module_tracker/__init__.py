"""`ModuleTracker`: tells which modules run now, and runs the user's hooks around every forward and backward."""
