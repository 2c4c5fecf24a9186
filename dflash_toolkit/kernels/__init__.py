"""Tensor operations. `reference.py` is the definition in plain torch; faster versions stand beside it."""
