"""Parameters and optimizer state that may live on the host, for strategies that move tensors."""
