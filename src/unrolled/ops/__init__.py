"""Pure functions that two or more mechanisms share.

An operation with several forms is a folder: `linear` (linear attention), `gla` (linear attention with a gate
per feature), `delta` (the delta rule), `dplr` (diagonal plus low rank), `conv`, `softmax`, `window`, `dense`.
Its `__init__.py` has the equations and the public functions, and `operator.py` registers it with torch and
chooses the backend. The other files are its plain PyTorch form and its backends: `native.py` for the C++
kernels, `triton*.py`, `flex.py`.
"""
