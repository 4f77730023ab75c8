"""Prices of a step: time and memory of its operators, and of the unplanned step."""
