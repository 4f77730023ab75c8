"""Runs a user's model and loss for planning, and restores their state afterwards."""
