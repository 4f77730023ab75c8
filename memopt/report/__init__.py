"""Summaries, tables, plots and progress: how people see plans and comparisons."""
