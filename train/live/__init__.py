"""A drafter that learns from the traffic it serves: what to train on, and which version to serve."""
