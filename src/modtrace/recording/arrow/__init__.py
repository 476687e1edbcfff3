"""Converts Arrow tables and batches from and to numpy, with dictionary codes and the rules that rows follow."""
