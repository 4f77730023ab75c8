"""Compiled kernels: parts of a captured step that Inductor makes one operator of."""
