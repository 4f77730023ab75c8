"""Addresses: an offset for every lifetime, the peak as low as can be."""
