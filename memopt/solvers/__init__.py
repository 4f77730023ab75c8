"""The solvers that strategies use: CP-SAT and 0-1 programs, their deadlines and Ctrl-C."""
