"""Tiled kernels: operators that work on tokens row by row become operators that run in chunks."""
