"""Passes over finished programs: early collectives, order, addresses."""
