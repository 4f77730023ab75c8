"""Whole training steps under a plan."""
