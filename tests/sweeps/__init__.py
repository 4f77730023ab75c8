"""Sweeps: many operators, each in every layout, under several plans."""
