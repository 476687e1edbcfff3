"""Arrow tables and batches: to and from numpy, dictionary codes, and the rules that rows keep."""
