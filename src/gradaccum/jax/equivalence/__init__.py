"""Prove it: whole against split, and what causes a difference."""
