"""Records collectives: what ranks send each other."""
