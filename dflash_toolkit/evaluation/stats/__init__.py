"""How sure figures and differences are: intervals and tests over requests."""
