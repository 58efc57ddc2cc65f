"""Where an operation chooses between its implementations: one module, one door, per operation."""
