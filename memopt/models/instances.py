"""Named instances with known optima, shared by tests, docs and benchmarks; `memopt.instances()` has
each by its name.

| instance | source | known |
|---|---|---|
| `rotor_toy` | Rotor Table 2 | `ROTOR_TOY_OPTIMA`, every budget |
| `rotor_figure_4` | Rotor §4.1, Figure 4 | `figure_4_makespans` |
| `rotor_partition` | Rotor §3.4, Theorem 3.6 | `partition_makespan` |
| `offload_three_partition` | Offloading, Figure 2 | the makespan, where the values split |
| `offload_two_partition` | Offloading, Figure 3 | the makespan, where the values split |
| `three_layers` | here | store-all's peak, by hand |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopt.models.chain import Chain, Stage
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind

MEGABYTE = 10**6

# ω_a, ω_ā, o_f, o_b in MB; u_f, u_b in ms. Stage 7 is the loss.
_TOY = (
    (9.54, 9.54, 0, 20.01, 1.60, 3.05),
    (10.68, 10.68, 0, 27.64, 2.20, 4.48),
    (11.06, 11.08, 0, 30.99, 2.44, 5.09),
    (10.68, 10.66, 0, 30.99, 2.51, 4.93),
    (9.54, 9.54, 0, 27.64, 2.10, 4.21),
    (7.63, 7.63, 0, 19.08, 1.43, 3.34),
    (0, 0, 0, 0, 0, 0),
)

ROTOR_TOY_OPTIMA: tuple[tuple[float, float], ...] = (
    (106.99, 37.38),
    (106.97, 39.82),
    (97.45, 41.18),
    (96.29, 42.02),
    (91.66, 43.62),
    (86.75, 47.42),
    (82.12, 56.17),
)
"""(smallest budget in MB, makespan in ms): every point of the toy chain's trade-off curve,
exact to 0.01 MB; below the last budget it is infeasible. Found by exhaustive search; the paper
gives the first (107 MB, 37.4 ms) and the sixth (86.8 MB, 47.4 ms)."""


def rotor_toy() -> Chain:
    """Return six linear layers and a loss that costs nothing (Rotor §3.2, Table 2); MB = 10⁶ bytes.

    Stage 4 has ω_ā < ω_a, as printed. The input's gradient is wanted (ω_δ^0 = ω_a^0).
    """
    stages = [
        Stage(
            forward_time_s=forward / 1000,
            backward_time_s=backward / 1000,
            output_bytes=round(output * MEGABYTE),
            saved_bytes=round(saved * MEGABYTE),
            gradient_bytes=round(output * MEGABYTE),
            forward_overhead_bytes=round(forward_overhead * MEGABYTE),
            backward_overhead_bytes=round(backward_overhead * MEGABYTE),
            name="loss" if not output else f"linear{index}",
        )
        for index, (
            output,
            saved,
            forward_overhead,
            backward_overhead,
            forward,
            backward,
        ) in enumerate(_TOY, 1)
    ]
    input_bytes = round(7.63 * MEGABYTE)
    return Chain(input_bytes, stages, input_gradient_bytes=input_bytes)


FIGURE_4_BUDGET_BYTES = 15
"""The memory limit M of Rotor Figure 4."""


def rotor_figure_4(n: int) -> Chain:
    """Return the counter-example of Rotor §4.1: no memory persistent schedule is optimal.

    L = n + 2 stages and the loss; u_f^1 = k = n − 2, u_f^2 = 2, all other times 0; sizes 3 but
    ω_a^0 = ω_a^{L+1} = 0, ω_a^1 = 1, ω_a^L = 4; ω_ā = ω_δ = ω_a. The budget is
    `FIGURE_4_BUDGET_BYTES`.

    Args:
        n: at least 3.
    """
    if n < 3:
        raise ValueError(f"rotor_figure_4: n must be at least 3, got {n}")
    last = n + 2
    sizes = {1: 1, last: 4, last + 1: 0}
    times = {1: n - 2, 2: 2}
    stages = [
        Stage(times.get(index, 0), 0, size, size, size, name=f"stage{index}")
        for index in range(1, last + 2)
        for size in (sizes.get(index, 3),)
    ]
    return Chain(0, stages)


def figure_4_makespans(n: int) -> dict[str, float]:
    """Return the optima of `rotor_figure_4(n)` at its budget, seconds, by class of schedules.

    "persistent": 3n − 2 and "weakly persistent": 2n + 2 (Rotor §4.1; the text also prints
    2k + 4, which is 2n).
    """
    return {"persistent": 3.0 * n - 2, "weakly persistent": 2.0 * n + 2}


def rotor_partition(values: Sequence[int]) -> tuple[Chain, int]:
    """Reduce 2-Partition to a chain (Rotor §3.4, Theorem 3.6): (chain, budget in bytes).

    With Σ values = 2V, the budget 3V allows a makespan of 4V (backward times are 0) exactly if
    some of the values sum to V. Stage 2k+1 takes x_k seconds and yields x_k bytes, the stages
    between them are free and empty, and stage 2n+1 takes V seconds and yields V bytes.

    Args:
        values: positive integers with an even sum.
    """
    half, odd = divmod(sum(values), 2)
    if odd or not values or min(values) < 1:
        raise ValueError("rotor_partition: positive integers with an even sum are needed")
    sizes = [size for value in values for size in (value, 0)]
    sizes += [half, 0]
    stages = [
        Stage(size, 0, size, size, size, name=f"stage{index}")
        for index, size in enumerate(sizes, 1)
    ]
    return Chain(0, stages), 3 * half


def partition_makespan(values: Sequence[int]) -> int:
    """Return the makespan of `rotor_partition(values)` if the values split evenly."""
    return 2 * sum(values)


THREE_LAYERS_PEAK_BYTES = 2524
"""Store-all's peak on `three_layers`, in the backward of layer 2: resident 964; the output 100
and its tangent 100, both held to the end; operands a1 300 and d2 200; the gradient of w3 200;
results d1 300 and the gradient of w2 300; workspace 60."""


def three_layers() -> Graph:
    """Return a training step of three layers with parameters, small enough to follow by hand."""
    names = ("x", "w1", "w2", "w3", "a1", "a2", "y", "dy", "d2", "g3", "d1", "g2", "g1")
    sizes = (64, 400, 300, 200, 300, 200, 100, 100, 200, 200, 300, 300, 400)
    kinds = (
        [TensorKind.INPUT, *[TensorKind.PARAMETER] * 3, *[TensorKind.ACTIVATION] * 2]
        + [TensorKind.OUTPUT]
        + [TensorKind.GRADIENT] * 6
    )
    x, w1, w2, w3, a1, a2, y, dy, d2, g3, d1, g2, g1 = range(13)
    backward = Phase.BACKWARD
    return Graph(
        [Tensor(*row) for row in zip(names, sizes, kinds, strict=True)],
        [
            Operator("layer1", (x, w1), (a1,), 1.0),
            Operator("layer2", (a1, w2), (a2,), 2.0, 50),
            Operator("layer3", (a2, w3), (y,), 1.0),
            Operator("layer3 backward", (dy, a2, w3), (d2, g3), 2.0, 40, backward),
            Operator("layer2 backward", (d2, a1, w2), (d1, g2), 4.0, 60, backward),
            Operator("layer1 backward", (d1, x), (g1,), 1.0, 0, backward),
        ],
        outputs=(y,),
        gradients=(g1, g2, g3),
        tangents=(dy,),
        boundary_bytes=20,
    )


def offload_three_partition(values: Sequence[int], parts: int) -> tuple[Chain, int, Device]:
    """Reduce 3-Partition to offloading (Offloading, Figure 2 as corrected): (chain, budget in
    bytes, device).

    The makespan is 2·parts seconds exactly if the values split into `parts` sets of equal sum:
    |x_i| = u_i for i < 3m; u_F = 1 and the output is empty for i = 3m + 2k, k < m;
    |x_{3m+2k+2}| = V; B_{3m} takes m. β = V, M = mV.

    Args:
        values: 3·parts positive integers.
        parts: how many sets; it divides the sum.
    """
    total = sum(values)
    if parts < 1 or len(values) != 3 * parts or total % parts or min(values) < 1:
        raise ValueError(
            "offload_three_partition: 3 * parts positive integers are needed, whose sum parts "
            "divides"
        )
    volume, first = total // parts, len(values)
    sizes = [*values, *([0] * (2 * parts + 1))]
    for k in range(parts):
        sizes[first + 2 * k + 2] = volume
    forward = [0.0] * len(sizes)
    for k in range(parts):
        forward[first + 2 * k] = 1.0
    backward = [0.0] * len(sizes)
    backward[first] = float(parts)
    return _offloaded(sizes, forward, backward), total, _one_way_link(volume)


def offload_two_partition(values: Sequence[int]) -> tuple[Chain, int, Device]:
    """Reduce 2-Partition to offloading with interruptions (Offloading, Figure 3): (chain, budget in
    bytes, device).

    The makespan is 2 s exactly if some of the values are half of their sum 2V: F_n and B_n take
    1 s, |x_{n+2}| = V; β = V, M = 2V.

    Args:
        values: positive integers with an even sum.
    """
    volume, odd = divmod(sum(values), 2)
    if odd or not values or min(values) < 1:
        raise ValueError("offload_two_partition: positive integers with an even sum are needed")
    n = len(values)
    sizes = [*values, 0, 0, volume, 0]
    times = [1.0 if i == n else 0.0 for i in range(n + 4)]
    return _offloaded(sizes, times, times), 2 * volume, _one_way_link(volume)


def _offloaded(sizes: Sequence[int], forward: Sequence[float], backward: Sequence[float]) -> Chain:
    """Make a chain of sizes x_0.. and times; the last output and all gradients have no bytes."""
    stages = [
        Stage(forward[i], backward[i], size, size, 0) for i, size in enumerate([*sizes[1:], 0])
    ]
    return Chain(sizes[0], stages)


def _one_way_link(bytes_per_s: float) -> Device:
    """Make a device with one transfer at a time and no latency (Offloading §3.1)."""
    return Device(name="link", to_host_bytes_per_s=bytes_per_s, duplex=False)


@dataclass(frozen=True)
class PaperInstance:
    """A named cost model: `memopt.plan(one.model, budget=one.budget_bytes, device=one.device)`.

    Attributes:
        name: its name.
        source: the paper, with section, figure or table.
        model: the chain or graph.
        budget_bytes: the budget that the paper takes, total bytes; None: it takes several.
        known: what is known of it.
        device: the paper's link; None: nothing moves.
    """

    name: str
    source: str
    model: Chain | Graph
    budget_bytes: int | None
    known: str
    device: Device | None = None


def instances() -> dict[str, PaperInstance]:
    """Return the papers' small instances by name, each with its budget and what is known of it. The
    functions of `memopt.models.instances` make others of their kinds."""
    split, budget_bytes = rotor_partition((3, 1, 1, 2, 2, 1))
    three, two = offload_three_partition((1, 1, 2, 1, 1, 2), 2), offload_two_partition((3, 1, 2))
    found = (
        PaperInstance(
            "rotor-toy",
            "Rotor §3.2, Table 2",
            rotor_toy(),
            90 * MEGABYTE,
            "47.42 ms in 86.75 MB; the optima of every budget: ROTOR_TOY_OPTIMA",
        ),
        PaperInstance(
            "rotor-figure-4",
            "Rotor §4.1, Figure 4, n = 6",
            rotor_figure_4(6),
            FIGURE_4_BUDGET_BYTES,
            "16 s for persistent schedules, 14 s for weakly persistent ones",
        ),
        PaperInstance(
            "rotor-partition",
            "Rotor §3.4, Theorem 3.6, values 3 1 1 2 2 1",
            split,
            budget_bytes,
            "20 s, since some of the values sum to half",
        ),
        PaperInstance(
            "offload-three-partition",
            "Offloading, Figure 2, values 1 1 2 1 1 2 in two sets",
            *three[:2],
            "4 s, since the values split into two sets of equal sum",
            three[2],
        ),
        PaperInstance(
            "offload-two-partition",
            "Offloading, Figure 3, values 3 1 2",
            *two[:2],
            "2 s with interrupted transfers, since 3 = 1 + 2",
            two[2],
        ),
        PaperInstance(
            "three-layers",
            "memopt, a step small enough to follow by hand",
            three_layers(),
            None,
            "store-all needs 2524 bytes",
        ),
    )
    return {one.name: one for one in found}
