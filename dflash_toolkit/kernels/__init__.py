"""Tensor operations: `ops.py` is their type, `reference.py` their definition, `gpu.py` the choice among kernels."""
