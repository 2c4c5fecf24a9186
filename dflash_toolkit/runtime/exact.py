"""Sizes up to which the bits of a row do not depend on how many other rows are computed with it."""

EXACT_BATCH = 8  # requests; larger batches use other matrix products
EXACT_ROWS = 128  # rows of all draft trees together
