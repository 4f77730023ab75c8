"""Measures costs: time and workspace of every distinct kernel call of a Graph.

Calls run on stand-in data. Some kernels need arguments that fit each other (pivots of a
factorisation, lengths of segments, the workspace that an LSTM's forward leaves to its backward):
they get those of a real step, as does a user's own code, which may need as much as values say.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memopt.errors import ProfileError
from memopt.models.device import in_blocks
from memopt.models.graph import Graph, Tensor
from memopt.models.progress import Progress
from memopt.models.warned import warn
from memopt.pricing.cache import Cost, ProfileCache
from memopt.pricing.device_probes import seconds_of
from memopt.pricing.memory import metered_sections
from memopt.pricing.real_arguments import real_arguments
from memopt.pricing.real_results import check_places, check_results, difference, left_bytes
from memopt.pricing.workspace import with_state
from memopt.step.backend import autocast_off, backend_of, processor, random_state_kept, timed
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.collectives import is_collective, waited
from memopt.step.numerics import numeric_settings
from memopt.step.operators import runs_users_code
from memopt.step.ranks import largest, meet
from memopt.step.signature import (
    REFUSALS,
    Arguments,
    Signature,
    StandIns,
    needs_real_values,
    output_mask,
)
from memopt.torch_private import pytree


def silent(_fraction: float, _what: str) -> None:
    """Ignore progress."""


_ON_ZEROS = (
    "the example's step does not fit in memory without a plan, so that {} ran on zeros to be "
    "measured: with real values the code may need more than the plan has for it"
)
_MINIMUM_SAMPLE_S = 100e-6
_PRECISION = 0.05
_MINIMUM_ROUNDS = 3
_MOST_COPIES = 8


@dataclass(frozen=True)
class MeasureOptions:
    """Limits of measuring.

    Attributes:
        cap_s: stop repeating after this many seconds in all.
        max_rounds: samples per kernel call at most.
        cache: keeps costs; None: they are not kept.
        renew: whether to measure calls that the cache knows again, and replace their costs.
    """

    cap_s: float = 15.0
    max_rounds: int = 25
    cache: ProfileCache | None = None
    renew: bool = False

    def costs(
        self,
        keys: Collection[str],
        measured: Callable[[list[str]], dict[str, Cost]],
        keep: bool = True,
    ) -> dict[str, Cost]:
        """Return the cost of each key: what the cache knows, the others measured and, if `keep`,
        kept."""
        known = self.cache.load(list(keys)) if self.cache and not self.renew else {}
        missing = [key for key in keys if key not in known]
        fresh = measured(missing) if missing else {}
        if self.cache and keep and fresh:
            self.cache.store(fresh)
        return {**known, **fresh}


def environment(device: torch.device) -> str:
    """Return the environment that runs kernels: device, threads, torch version."""
    runtime = backend_of(device).runtime
    if runtime is not None:
        return f"{runtime.get_device_name(device)}|torch {torch.__version__}"
    threads = torch.get_num_threads()
    return f"cpu {processor()}|{threads} threads|torch {torch.__version__}"


def priced_for(device: torch.device) -> str:
    """Return the parts of a cost's key besides the call: the environment, and torch's settings that
    choose kernels (TF32, cuDNN's benchmark, deterministic algorithms...)."""
    return "|".join(filter(None, (environment(device), numeric_settings())))


def measure(
    lowering: Lowering,
    device: torch.device,
    options: MeasureOptions,
    progress: Progress = silent,
    captured: Captured | None = None,
) -> Graph:
    """Return the lowering's Graph with measured times, workspaces and real output sizes.

    Each distinct call (operator, shapes, strides, other arguments) is measured once, alone, on
    stand-in data: one warm-up, then interleaved rounds until the median's standard error is within
    5% or the cap is reached. Random state is left as it was. Autocast is off: its casts are calls
    of their own. Kernels that refuse stand-in data get their arguments from a step on the example
    inputs, if `captured`, the captured model, is given.

    Raises:
        ProfileError: a kernel refuses its arguments.
        CaptureError: a kernel leaves other storages than the graph says that it writes.
    """
    costs = costs_of(lowering.signatures, device, options, progress, captured)
    damaged = options.cache is not None and difference(lowering, costs) is not None
    if any(largest([float(damaged)])):
        # A damaged row of the cache may explain the difference, so measure again, on all ranks that
        # measure together.
        renewed = replace(options, renew=True)
        costs = costs_of(lowering.signatures, device, renewed, progress, captured)
    check_results(lowering, costs)
    return with_state(with_costs(lowering, costs), backend_of(device))


def costs_of(
    signatures: Sequence[Signature],
    device: torch.device,
    options: MeasureOptions,
    progress: Progress = silent,
    captured: Captured | None = None,
    timed: bool = True,
) -> list[Cost]:
    """Return the measured cost of each kernel call; see `measure`. If not `timed`, each call that
    is not in the cache runs just twice, for its workspace and result sizes."""
    place = priced_for(device)
    calls = {f"{place}|{s.text}": s for s in signatures if not is_collective(s.target)}

    def measured(keys: list[str]) -> dict[str, Cost]:
        missing = [calls[key] for key in keys]
        with random_state_kept([device]), torch.no_grad(), autocast_off():
            fresh = _measure(missing, device, options, progress, captured, timed)
        return dict(zip(keys, fresh, strict=True))

    known = options.costs(calls, measured, keep=timed)
    network = network_costs(signatures, device)
    return [network.get(s.text) or known[f"{place}|{s.text}"] for s in signatures]


def with_costs(lowering: Lowering, costs: list[Cost]) -> Graph:
    """Return the lowering's Graph with one Cost per operator."""
    graph = lowering.graph
    tensors = list(graph.tensors)
    operators = []
    for operator, cost in zip(graph.operators, costs, strict=True):
        if len(operator.writes) == len(cost.output_bytes):
            for tensor, size in zip(operator.writes, cost.output_bytes, strict=True):
                old = tensors[tensor]
                tensors[tensor] = Tensor(old.name, size, old.kind)
        priced = replace(
            operator,
            time_s=cost.time_s,
            workspace_bytes=cost.workspace_bytes,
            # Kernels may return larger storages than their fake ones (fold).
            in_place=tuple(
                t
                for t in operator.in_place
                if tensors[t].size_bytes == tensors[operator.writes[0]].size_bytes
            ),
        )
        operators.append(priced)
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators))


def _measure(
    missing: list[Signature],
    device: torch.device,
    options: MeasureOptions,
    progress: Progress,
    captured: Captured | None,
    timed: bool,
) -> list[Cost]:
    stand_ins = StandIns(device)
    outputs = _output_sizes(missing, stand_ins, device, captured, progress)
    uses = metered_sections(device, [functools.partial(_ready, one, stand_ins) for one in missing])
    times = [0.0] * len(missing)
    if timed:
        times = _times(missing, stand_ins, device, options, progress)
    return [
        Cost(seconds, max(0, use.peak_bytes - use.end_bytes), sizes)
        for seconds, use, sizes in zip(times, uses, outputs, strict=True)
    ]


def _output_sizes(
    missing: list[Signature],
    stand_ins: StandIns,
    device: torch.device,
    captured: Captured | None,
    progress: Progress,
) -> list[tuple[int, ...]]:
    """Return the bytes that each call's first run leaves. One real step gives arguments to all
    calls that refuse stand-in data."""
    found: dict[str, tuple[int, ...]] = {}
    refused: dict[str, ProfileError | None] = {}
    for position, one in enumerate(missing):
        progress(0.3 * position / len(missing), f"warming up {one.target}")
        if captured is not None and needs_real_values(one.target):
            refused[one.text] = None
            continue
        try:
            found[one.text] = _run_once(one, stand_ins, device)
        except ProfileError as error:
            if captured is None:
                raise
            refused[one.text] = error
    if refused and captured is not None:
        try:
            stand_ins.give(real_arguments(captured, refused))
        except torch.OutOfMemoryError:
            users = [one for one in missing if runs_users_code(one.target)]
            if any(refused[text] is not None for text in refused) or not users:
                raise
            warn(_ON_ZEROS.format(", ".join(sorted({str(one.target) for one in users}))))
        except REFUSALS as error:  # an operator before them refuses
            raise next(filter(None, refused.values()), error) from None
    for one in missing:
        if one.text in refused:
            found[one.text] = _run_once(one, stand_ins, device)
    return [found[one.text] for one in missing]


def _run_once(one: Signature, stand_ins: StandIns, device: torch.device) -> tuple[int, ...]:
    arguments = stand_ins.arguments(one)
    result = _call(one, arguments)()
    check_places(one, result)
    return left_bytes(result, arguments, device)


def _ready(one: Signature, stand_ins: StandIns) -> Callable[[], object]:
    """Make a call's arguments; return the call, ready to run."""
    return _call(one, stand_ins.arguments(one))


def _call(one: Signature, arguments: Arguments) -> Callable[[], object]:
    args, kwargs = arguments
    # oneDNN's convolution backward makes the weight's gradient even when only the bias's is asked
    # for. A step drops it at once: it is workspace.
    mask = output_mask(one.target, one.args, one.kwargs)

    def run() -> object:
        try:
            result = one.target(*args, **kwargs)
            if mask is None:
                return result
            return tuple(v if asked else None for v, asked in zip(result, mask, strict=True))
        except REFUSALS as error:
            message = f"{one.text} cannot be measured on stand-in data: {error}"
            raise ProfileError(message) from error

    return run


def _sample(one: Signature, stand_ins: StandIns, device: torch.device, repeats: int) -> float:
    """Return the mean seconds of one call over `repeats` calls in a row (`seconds_of`). On a device
    they take turns with copies of their arguments: a step reads each once."""
    arguments = stand_ins.arguments(one)
    turns, target = [arguments], one.target
    backend = backend_of(device)
    if not backend.on_host:
        given = sum(t.nbytes for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor))
        copies = min(repeats, _MOST_COPIES, 1 + backend.cache_bytes // max(given, 1))
        turns += [stand_ins.arguments(one) for _ in range(copies - 1)]

    def run(number: int) -> object:
        args, kwargs = turns[number % len(turns)]
        return target(*args, **kwargs)

    return seconds_of(run, device, repeats) / repeats


def _precise(samples: list[float]) -> bool:
    if len(samples) < _MINIMUM_ROUNDS:
        return False
    middle = statistics.median(samples)
    spread = statistics.median(abs(s - middle) for s in samples)
    # 1.4826 MAD estimates σ; the standard error of a median is 1.2533 σ/√n.
    return 1.2533 * 1.4826 * spread / math.sqrt(len(samples)) <= _PRECISION * middle


def _times(
    missing: list[Signature],
    stand_ins: StandIns,
    device: torch.device,
    options: MeasureOptions,
    progress: Progress,
) -> list[float]:
    samples: list[list[float]] = [[] for _ in missing]
    first = [_sample(one, stand_ins, device, 1) for one in missing]
    repeats = [max(1, math.ceil(_MINIMUM_SAMPLE_S / max(s, 1e-9))) for s in first]
    repeats = [min(r, 100) for r in repeats]
    begin = time.perf_counter()
    for round_number in range(options.max_rounds):
        spent = time.perf_counter() - begin
        open_ = [i for i, s in enumerate(samples) if not _precise(s)]
        if not open_ or (spent > options.cap_s and round_number > 0):
            break
        share = max(round_number / options.max_rounds, spent / options.cap_s)
        progress(min(1.0, 0.3 + 0.7 * share), f"timing {len(open_)} kernels")
        for i in open_:
            samples[i].append(_sample(missing[i], stand_ins, device, repeats[i]))
    return [statistics.median(s) for s in samples]


ROUNDS = 5


def network_costs(signatures: Iterable[Signature], device: torch.device) -> dict[str, Cost]:
    """Return the costs of collectives among kernel calls, by their texts: the median of `ROUNDS`
    rounds from call to end of wait. Calls of a fake process group take no time.

    Never until they are precise, nor from a cache: a rank that stopped earlier, or knew the cost,
    would leave the others waiting."""
    distinct = {one.text: one for one in signatures if is_collective(one.target)}
    if not distinct:
        return {}
    meet()
    stand_ins = StandIns(device)
    return {text: _cost(one, stand_ins, device) for text, one in distinct.items()}


def _cost(one: Signature, stand_ins: StandIns, device: torch.device) -> Cost:
    args, kwargs = stand_ins.arguments(one)
    results: list[Any] = []

    def run() -> None:
        results[:] = [one.target(*args, **kwargs)]
        waited(results[0])

    with torch.no_grad():
        run()
        times = [timed(run, device) for _ in range(ROUNDS)]
        results.clear()
        (use,) = metered_sections(device, [lambda: run])
    tensors = results[0] if isinstance(results[0], (list, tuple)) else results
    block = backend_of(device).block_bytes
    sizes = tuple(in_blocks(tensor.untyped_storage().nbytes(), block) for tensor in tensors)
    return Cost(statistics.median(times), max(0, use.peak_bytes - sum(sizes)), sizes)
