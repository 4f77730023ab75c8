"""Chains for the tests: the paper's examples, and small random ones with every oddity."""

from __future__ import annotations

import random

import numpy as np

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
    size = [0, 1, *[3] * n, 4, 0]
    stages = [
        Stage({1: n - 2, 2: 2}.get(i, 0), 0, size[i], size[i], size[i]) for i in range(1, len(size))
    ]
    return Chain(size[0], stages)


def random_chain(seed: int, most_stages: int = 6) -> Chain:
    """A chain of 1 to `most_stages` stages with small integer sizes and times.

    By seed: zeros, equal sizes, growing and shrinking activations, parameter gradients, separate
    overheads with and without saving, ω_ā = ω_a, a loss that costs nothing.
    """
    draw = random.Random(seed)
    n = draw.randint(1, most_stages)
    shape = draw.choice(("any", "equal", "growing", "shrinking"))
    most = draw.choice((2, 4, 8))
    output = [draw.randint(0, most) for _ in range(n + 1)]
    if shape == "equal":
        output = [draw.randint(1, most)] * (n + 1)
    elif shape != "any":
        output.sort(reverse=shape == "shrinking")
    tied = draw.random() < 0.5
    gradient = list(output) if tied else [draw.randint(0, most) for _ in range(n + 1)]
    with_overheads, with_parameters = draw.random() < 0.5, draw.random() < 0.5
    fat, longest = draw.choice((0, most, 2 * most)), draw.choice((1, 3, 9))
    stages = []
    for k in range(1, n + 1):
        overhead = draw.randint(0, most) if with_overheads else 0
        stages.append(
            Stage(
                forward_time_s=draw.randint(0, longest),
                backward_time_s=draw.randint(0, longest),
                output_bytes=output[k],
                saved_bytes=output[k] + draw.randint(0, fat),
                gradient_bytes=gradient[k],
                forward_overhead_bytes=overhead,
                forward_no_save_overhead_bytes=draw.choice((None, draw.randint(0, most)))
                if with_overheads
                else None,
                backward_overhead_bytes=draw.randint(-1, 2 * most) if with_overheads else 0,
                parameter_gradient_bytes=draw.randint(0, most) if with_parameters else 0,
            )
        )
    if n > 1 and draw.random() < 0.5:
        stages[-1] = Stage(0, 0, 0, 0, 0)
    return Chain(output[0], stages, draw.randint(0, 3), gradient[0])


def long_chain(layers: int, seed: int = 0) -> Chain:
    """Draw a chain like a ResNet's, and a loss that costs nothing: sizes fall by a factor 8 from
    the first stage to the last, times and ā vary at random."""
    draw = np.random.default_rng(seed)
    stages = []
    for i in range(layers):
        scale = 2.0 ** -(3 * i // layers)
        output = int(1e6 * scale * draw.choice([1, 1, 1, 2]))
        stages.append(
            Stage(
                forward_time_s=float(draw.uniform(0.5, 1.5)),
                backward_time_s=float(draw.uniform(1, 3)),
                output_bytes=output,
                saved_bytes=int(output * draw.uniform(2, 5)),
                gradient_bytes=output,
                forward_overhead_bytes=int(output * draw.uniform(0, 1)),
                backward_overhead_bytes=int(output * draw.uniform(0, 2)),
                parameter_gradient_bytes=int(1e4 / scale),
            )
        )
    return Chain(500_000, [*stages, Stage(0.0, 0.0, 0, 0, 0)], resident_bytes=10**7)
