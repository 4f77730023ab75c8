"""A captured training step: its call, graph, operators, updates and costs."""
