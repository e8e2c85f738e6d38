"""gradaccum for PyTorch."""
