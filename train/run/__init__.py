"""A run: its data, start, state, cost, metrics and held-out decoding."""
