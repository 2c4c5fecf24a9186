"""Tensor operations: `ops.py` is their type, `reference` their definition, `gpu.py` the choice among kernels."""
