"""The routes, with one file for each group of paths."""
