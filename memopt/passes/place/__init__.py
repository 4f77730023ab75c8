"""Placement: an offset for every lifetime, with the peak as low as possible."""
