"""The cost model: everything that is true without torch."""
