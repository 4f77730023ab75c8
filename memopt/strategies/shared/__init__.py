"""What several strategies share: one mover, the relaxations, and the plans of a graph's chain."""
