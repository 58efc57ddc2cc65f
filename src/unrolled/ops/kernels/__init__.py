"""Backends of the operations, C++ for CPUs, Triton and flex_attention for GPUs, and dispatch to them."""
