"""A training run: preparation, budget, cost, resume points, metrics, held-out decoding and publication."""
