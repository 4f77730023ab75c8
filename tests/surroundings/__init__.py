"""What happens around a model while it trains: situations, four ways to plan them, and a judge.

`python -m tests.surroundings` prints the table of all; with names, those of them.
"""
