"""Rows that the tests of `micro_batched` share: numbers, classes, weights, and padded tokens with tags."""

import numpy as np

ROWS, BATCH, MICRO = 22, 11, 4
"""Two batches of one shape, compiled once; micro-batches of 4, 4 and 3 rows."""

random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 5))
CLASSES = random.integers(0, 3, ROWS)
WEIGHTS = random.uniform(0.5, 2, ROWS)
TOKENS = random.integers(1, 7, (ROWS, 6))
for row, length in enumerate(random.integers(1, 7, ROWS)):
    TOKENS[row, length:] = 0
TAGS = random.integers(0, 3, (ROWS, 6))
