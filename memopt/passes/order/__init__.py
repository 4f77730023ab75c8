"""The order of operators: the least peak memory over all valid orders."""
