"""Optimizers and the schedule of learning rate and rows."""
