"""What both shells need where the tensors are PyTorch's: the PyTorch shell, and Keras on its PyTorch backend."""
