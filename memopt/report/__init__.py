"""What people look at: summaries, tables, plots, progress."""
