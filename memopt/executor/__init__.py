"""Run a plan: generated code inside AOTAutograd's runtime, swapping, guards."""
