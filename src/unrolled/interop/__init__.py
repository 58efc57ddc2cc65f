"""Import and export of models and weights of other libraries. Each module needs its own extra."""
