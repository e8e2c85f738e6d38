"""Prove it: whole against split, and what causes a difference."""

from gradaccum.jax.equivalence.check import check_equivalence

__all__ = ["check_equivalence"]
