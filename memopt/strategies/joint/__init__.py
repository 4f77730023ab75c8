"""The joint strategy: recompute, move to the host, and choose implementations in one plan."""
