"""Training of small decoders under torch's engines, each beside itself with memopt.wrap: the cells
of the tests' matrix, and of the page that `python -m benchmarks engines` writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.pricing.memory import MemoryUse, metered
from memopt.step.backend import backend_of
from tests.distributed import cases
from tests.distributed import decoders as small
from tests.distributed.decoders import (
    MICRO_BATCHES,
    STEPS,
    SUBJECTS,
    TOKENS,
    VOCABULARY,
    blockwise,
)
from tests.distributed.loops import SCHEDULES, TRAINERS, pipelined

STRATEGY = "rotor"
"""Plans in a second, the same on every rank; the default searches for some ten."""


def _line(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def _square(ranks: int, *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (max(1, ranks // 2), 2), mesh_dim_names=names)


def _fsdp_tp(model: Any, ranks: int, wrap: small.Wrap) -> Any:
    mesh = _square(ranks, "data", "tensor")
    model = small.tensor_parallel(model, mesh["tensor"])
    return wrap(blockwise(model, mesh["data"]))


def _expert_parallel(model: Any, ranks: int, wrap: small.Wrap) -> Any:
    """Spread the experts; what all ranks hold is averaged as by data parallelism."""
    for block in model.blocks:
        block.feed = small.SpreadExperts(block.feed, torch.distributed.get_rank(), ranks)
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return _unrebuilt(wrap(model))


def _unrebuilt(model: Any) -> Any:
    """Keep DDP from making its buckets anew in the order in which gradients came: over more than
    two ranks the place in a bucket decides in which order they are added up."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def _accelerated(model: Any, ranks: int, wrap: small.Wrap, fsdp: bool = False) -> Any:
    """Prepare by accelerate, which is told to take FSDP2 on a CPU."""
    import accelerate
    from accelerate.state import AcceleratorState

    cases.launched(ranks)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    if not fsdp:
        return accelerator.prepare(wrap(model))
    cases.fsdp2_on_cpu("Block")
    # It prepares a model for FSDP2 with its optimizer alone.
    return wrap(accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0])


def _by_fabric(model: Any, ranks: int, wrap: small.Wrap, fsdp: bool = False) -> Any:
    from tests.zoo import torchvision_shim  # noqa: F401 (before lightning)

    import lightning  # isort: skip
    from lightning.fabric.strategies import ModelParallelStrategy  # isort: skip

    cases.launched(ranks)
    strategy: Any = "ddp"
    if fsdp:
        strategy = ModelParallelStrategy(
            lambda inner, mesh: blockwise(inner, mesh["data_parallel"]),
            data_parallel_size=ranks,
            tensor_parallel_size=1,
        )
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    return wrap(fabric.setup_module(model)) if fsdp else fabric.setup_module(wrap(model))


ENGINES: dict[str, Callable[[Any, int, small.Wrap], Any]] = {
    "DDP": lambda m, _, wrap: DistributedDataParallel(wrap(m)),
    "DDP, find_unused_parameters": lambda m, _, wrap: _unrebuilt(wrap(m)),
    "replicate, then wrap": lambda m, _, wrap: wrap(replicate(m)),
    "wrap, then replicate": lambda m, _, wrap: replicate(wrap(m)),
    "FSDP2 by blocks, then wrap": lambda m, n, wrap: wrap(blockwise(m, _line(n))),
    "FSDP2 whole, then wrap": lambda m, n, wrap: wrap(fully_shard(m, mesh=_line(n))),
    "wrap blocks, then FSDP2": lambda m, n, wrap: blockwise(m, _line(n), wrap),
    "memopt.shard": lambda m, n, wrap: wrap(memopt.shard(m, _line(n))),
    "memopt.shard, replicas": lambda m, n, wrap: wrap(
        memopt.shard(m, init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("r", "s")))
    ),
    "tensor parallel": lambda m, n, wrap: wrap(small.tensor_parallel(m, _line(n))),
    "tensor and sequence parallel": lambda m, n, wrap: wrap(
        small.tensor_parallel(m, _line(n), True)
    ),
    "FSDP2 x tensor parallel": _fsdp_tp,
    "expert parallel, DDP": _expert_parallel,
    "FSDP2 by blocks, replicas": lambda m, n, wrap: wrap(
        blockwise(m, _square(n, "replicas", "shards"))
    ),
    "accelerate, DDP": _accelerated,
    "accelerate, FSDP2": lambda m, n, wrap: _accelerated(m, n, wrap, True),
    "Lightning Fabric, DDP": _by_fabric,
    "Lightning Fabric, FSDP2": lambda m, n, wrap: _by_fabric(m, n, wrap, True),
}
"""Engine → (model, ranks, how to plan a module) → what a loop calls."""
_ONE_BATCH = ("tensor parallel", "tensor and sequence parallel", "FSDP2 x tensor parallel")
"""Engines some ranks of which share a batch; here all do."""
_WITHOUT_EXPERTS = ("tensor and sequence parallel",)
"""Engines that this file gives no layout for a router of experts."""
_OF_EXPERTS = ("expert parallel, DDP",)


def trained(model: Any, data: int) -> small.Ran:
    """Train on data of a seed."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    torch.manual_seed(100 + data)
    found, peak_bytes = [], 0
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            last = number == MICRO_BATCHES - 1
            plain = contextlib.nullcontext(MemoryUse())
            meter: Any = metered(torch.device("cpu")) if last and step >= STEPS - 3 else plain
            quiet: Any = contextlib.nullcontext()
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            elif hasattr(model, "no_sync") and not last:
                quiet = model.no_sync()
            tokens = torch.randint(0, VOCABULARY, (2, TOKENS))
            with quiet, meter as use:
                loss = small.loss_of(model(tokens), tokens)
                loss.backward()
            peak_bytes = max(peak_bytes, use.peak_bytes)
            found.append(loss.item())
            del loss
        slopes = [one.grad for one in model.parameters() if one.grad is not None]
        norms = list(map(torch.linalg.vector_norm, slopes))
        whole = list(map(cases.whole, norms))
        found.append(small.stepped(optimizer, torch.linalg.vector_norm(torch.stack(whole))))
    # Its whole parameters are resident for a plan, and fully_shard gathers them in the micro-batch.
    gathered = model.parameters() if hasattr(model, "unshard") else ()
    return found, cases.own(model), peak_bytes - sum(p.nbytes for p in gathered)


ALL = (*ENGINES, *TRAINERS, *SCHEDULES)
_ON_FOUR = (
    "DDP",
    "DDP, find_unused_parameters",
    "FSDP2 by blocks, then wrap",
    "memopt.shard",
    "memopt.shard, replicas",
    "FSDP2 x tensor parallel",
    "expert parallel, DDP",
    "FSDP2 by blocks, replicas",
    "pipeline, 1F1B",
)
"""Engines that are run on four ranks: with meshes of two dimensions, and one of each other kind."""


@dataclass(frozen=True)
class Cell:
    """A model under an engine.

    Attributes:
        failed: what differs, or the refusal; "": nothing.
        planned, calls: calls that ran under plans, and all.
        over_bytes: of the last micro-batch's peak above its budget, of a pipeline of the step's
            above those of a rank's stages; None: several plans share one.
    """

    model: str
    engine: str
    failed: str = ""
    planned: int = 0
    calls: int = 0
    over_bytes: int | None = None
    ranks: int = 2


def cell(rank: int, ranks: int, name: str, engine: str) -> Cell:
    """Train both ways on one rank."""
    wrapped: list[Any] = []
    counted: list[memopt.executor.calls.Calls] = []

    def wrap(module: Any) -> Any:
        wrapped.append(memopt.wrap(module, "min", STRATEGY, progress=False))
        return module

    def run(plan: small.Wrap) -> small.Ran:
        model = small.Decoder(SUBJECTS[name])
        if engine in TRAINERS:
            how, fsdp = TRAINERS[engine]
            *found, calls = how(model, ranks, plan is wrap, fsdp)
            counted[:] = [calls]
            return found[0], found[1], None
        if engine in ENGINES:
            data = 0 if engine in _ONE_BATCH else rank
            return trained(ENGINES[engine](model, ranks, plan), data)
        schedule, each, folded = SCHEDULES[engine]
        stages = each * ranks
        own = (rank, stages - 1 - rank if folded else rank + ranks)[:each]
        return pipelined(model, plan, schedule, own, stages)

    made = Cell(name, engine, ranks=ranks)
    try:
        before, after = run(lambda module: module), run(wrap)
    except (memopt.errors.MemoptError, RuntimeError, ValueError) as error:
        return replace(made, failed=f"{type(error).__name__}: {error}".partition("\n")[0])
    counts = counted or [memopt.running(one).calls for one in wrapped]
    planned = sum(one.planned for one in counts)
    calls = planned + sum(one.original + one.replanned for one in counts)
    same = before[0] == after[0] and cases.same(before[1], after[1])
    made = replace(made, failed="" if same else "differs", planned=planned, calls=calls)
    plans = [memopt.running(one).plans[-1] for one in wrapped if memopt.running(one).plans]
    if after[2] is None or not plans or (len(wrapped) != 1 and engine not in SCHEDULES):
        return made
    # Scalars that a step makes are metered, and resident for a plan.
    scalars_bytes = backend_of("cpu").step_scalars_bytes
    beside_bytes = 0
    for one in plans:
        assert one.budget is not None
        beside_bytes += one.resident_bytes - scalars_bytes - one.budget
    return replace(made, over_bytes=beside_bytes + after[2])


def cells(rank: int, ranks: int, name: str, engines: list[str]) -> list[Cell]:
    """Train a model under engines, one after the other, in a group that is there."""
    left_out: tuple[str, ...] = _WITHOUT_EXPERTS if SUBJECTS[name].experts else _OF_EXPERTS
    if ranks != 2:
        left_out += tuple(set(ALL) - set(_ON_FOUR))
    return [cell(rank, ranks, name, engine) for engine in engines if engine not in left_out]
