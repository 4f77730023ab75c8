"""Random sweeps: small samples in the fast suite, the whole of them marked `slow`."""
