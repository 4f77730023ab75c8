"""The commands of the command line, their options, models by name, and output."""
