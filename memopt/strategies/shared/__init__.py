"""Code that several strategies share: the mover, the relaxations, plans of a graph's chain."""
