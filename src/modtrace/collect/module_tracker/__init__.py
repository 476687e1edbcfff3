"""`ModuleTracker`: which modules run now, and the user's hooks around every forward and backward."""
