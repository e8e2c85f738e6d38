"""What a proof asks of PyTorch: arithmetic on tensors, rowwise random numbers, kinds of batches, probes of modules."""
