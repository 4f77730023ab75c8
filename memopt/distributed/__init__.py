"""Training on many devices."""
