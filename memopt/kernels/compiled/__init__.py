"""Compiled kernels: parts of a captured step that Inductor turns into one operator each."""
