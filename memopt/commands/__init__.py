"""What the command line is made of: finding models, printing, failing."""
