"""Gradient accumulation for PyTorch (`runai.ga.torch`) and Keras (`runai.ga.keras`)."""
