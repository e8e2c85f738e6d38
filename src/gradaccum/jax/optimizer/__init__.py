"""Wrap the optimizer: one inner update per window."""
