"""The routes, one file for each group of addresses."""
