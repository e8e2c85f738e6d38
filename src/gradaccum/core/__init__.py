"""The framework-free core: windows and weights, sizes of micro-batches, noise scale, proofs and their record."""
