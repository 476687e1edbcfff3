"""`ModuleTracker`: who is running now, and the user's hooks around every forward and backward."""
