"""A corpus of plans, recorded before code is moved or rewritten and compared afterwards."""
