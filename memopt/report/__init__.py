"""Summaries, tables, plots and pages of plans and comparisons, and progress bars."""
