"""Pure functions that two or more mechanisms share."""
