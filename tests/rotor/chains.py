"""Chains for the tests: the paper's examples, and small random ones with every oddity."""

from __future__ import annotations

from memopt.models.chain import Chain, Stage

TOY_CURVE = (
    (8212, 56.17),
    (8675, 47.42),
    (9166, 43.62),
    (9629, 42.02),
    (9745, 41.18),
    (10697, 39.82),
    (10699, 37.38),
)
"""(smallest budget in units of 0.01 MB, makespan in ms) of the toy chain, every schedule."""


def toy_chain() -> Chain:
    """Rotor Table 2 in units of 0.01 MB and ms; stage 7 is the loss and costs nothing."""
    output = (954, 1068, 1106, 1068, 954, 763, 0)
    saved = (954, 1068, 1108, 1066, 954, 763, 0)
    overhead = (2001, 2764, 3099, 3099, 2764, 1908, 0)
    forward = (1.60, 2.20, 2.44, 2.51, 2.10, 1.43, 0.0)
    backward = (3.05, 4.48, 5.09, 4.93, 4.21, 3.34, 0.0)
    stages = [
        Stage(forward[i], backward[i], output[i], saved[i], output[i], 0, None, overhead[i])
        for i in range(7)
    ]
    return Chain(763, stages, input_gradient_bytes=763)


def figure_4_chain(n: int) -> Chain:
    """Rotor figure 4 with k = n - 2: L = n + 2 stages of free forward but the first two, M = 15."""
    size = [0, 1, *[3] * (n - 1), 4, 0]
    stages = [
        Stage({1: n - 2, 2: 2}.get(i, 0), 0, size[i], size[i], size[i]) for i in range(1, len(size))
    ]
    return Chain(size[0], stages)
