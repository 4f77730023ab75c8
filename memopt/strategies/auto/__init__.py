"""The auto strategy: several strategies, and the fastest valid plan among theirs."""
