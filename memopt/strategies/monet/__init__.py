"""MONeT and Checkmate: 0-1 programs over recomputation and implementations."""
