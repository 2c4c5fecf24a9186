"""Confidence intervals and tests of figures and differences, over requests."""
