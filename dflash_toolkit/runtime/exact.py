"""The largest sizes at which a row's bits do not depend on the number of other rows."""

EXACT_BATCH = 8  # requests; larger batches use other matrix products
EXACT_ROWS = 128  # rows of all draft trees together
