"""Attention you train as a transformer and run as an RNN."""
