"""Mutation testing of what everything else rests on; `python -m tests.mutation --help`."""
