"""Arrow tables and batches: conversion from and to numpy, dictionary codes, and the rules that rows follow."""
