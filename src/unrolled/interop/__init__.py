"""Import and export of models and weights of other libraries. Each module needs an extra of its own."""
