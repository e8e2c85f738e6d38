"""The guide's experiment, run for real: batch 64, batch 16 accumulated 4 times, and batch 16 alone."""
