"""Counts bytes of optimizer state, from an optimizer's instance or its name.

Per parameter of n elements (p: bytes of the parameter's own element):

    sgd                 0
    sgd-momentum        p·n                      the momentum buffer
    adam, adamw         2p·n                     torch's: both moments in the parameter's dtype
    adam-fp32, adamw-fp32
                        8n, and 4n more where the parameter has fewer than four bytes:
                        fp32 moments and an fp32 master copy (K = 12 of ZeRO, arXiv:1910.02054 §3.1)
    adam-8bit, adamw-8bit
                        2n + 8·⌈n/256⌉           two 8-bit moments, an fp32 scale per block of 256
                        (Dettmers et al., arXiv:2110.02861; bitsandbytes' present block size);
                        parameters below 4,096 elements keep fp32 moments, as bitsandbytes does
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memopt.models.device import in_blocks
from memopt.models.optimizer_names import OPTIMIZERS, optimizer_name
from memopt.step.shards import any_shards, local_part

_8BIT_BLOCK = 256
_8BIT_SMALLEST = 4096


@dataclass(frozen=True)
class OptimizerState:
    """State that an optimizer keeps between steps.

    Attributes:
        name: the optimizer, for people.
        bytes_total: over all trainable parameters, in the allocator's blocks.
        parts: (description, bytes), whose sum is printed.
        count_bytes: of the total, the counts of steps: they stay on the device.
    """

    name: str
    bytes_total: int
    parts: tuple[tuple[str, int], ...] = ()
    count_bytes: int = 0


PER_PARAMETER: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], int]] = {
    torch.optim.SGD: lambda group: int(bool(group["momentum"])),
    torch.optim.Adam: lambda group: 2 + int(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + int(group["amsgrad"]),
    torch.optim.RMSprop: lambda group: 1 + int(bool(group["momentum"])) + int(group["centered"]),
    torch.optim.Adagrad: lambda _group: 1,
    torch.optim.NAdam: lambda _group: 2,
    torch.optim.Adamax: lambda _group: 2,
    torch.optim.Adadelta: lambda _group: 2,
}
"""Optimizers that treat every parameter on its own → how many tensors of its size they keep for it,
by its group's options. RAdam is not one: its later updates take more memory than its first."""


def optimizer_state(
    optimizer: str | torch.optim.Optimizer | None,
    parameters: Iterable[torch.Tensor],
    block_bytes: int = 1,
    device: torch.device | None = None,
) -> OptimizerState:
    """Return the state that an optimizer keeps for a model's trainable parameters.

    Args:
        optimizer: a name (see the module), a `torch.optim` instance, or None (no state).
        parameters: the model's parameters; fake and meta tensors will do. Frozen ones have none.
        block_bytes: the allocator's granularity.
        device: where an instance updates them (moved ones lie elsewhere); None: where they lie.

    Raises:
        ValueError: an unknown name or class (the message lists the known ones), or an instance
            that trains none of these parameters.
    """
    if optimizer is None:
        return OptimizerState("none", 0)
    if isinstance(optimizer, torch.optim.Optimizer):
        trained = [one for group in optimizer.param_groups for one in group["params"]]
        own = list(parameters)
        # In the forward an engine has whole parameters in the places of those that are trained.
        gathered = any_shards(trained) and not any_shards(own)
        gathered |= not all(one.is_leaf for one in own)
        if not gathered and not {*map(id, own)} & {*map(id, trained)}:
            raise ValueError(
                f"the {type(optimizer).__name__} trains no parameter of this model: pass the one "
                "that is made with model.parameters()"
            )
        return _of_instance(optimizer, block_bytes, device)
    if not isinstance(optimizer, str):
        raise ValueError(
            f"optimizer must be a torch.optim instance or a name, got {optimizer!r}; a class must "
            "be called with the model's parameters: optimizer=torch.optim.AdamW(model.parameters())"
        )
    name = optimizer_name(optimizer)
    trained = [local_part(p) for p in dict.fromkeys(parameters) if p.requires_grad]
    totals: dict[str, int] = {}
    for parameter in trained:
        for what, size in _named(name, parameter.numel(), parameter.element_size()):
            totals[what] = totals.get(what, 0) + in_blocks(size, block_bytes)
    parts = tuple(totals.items())
    return OptimizerState(name, sum(size for _, size in parts), parts)


def smaller_states(
    state: OptimizerState, parameters: Iterable[torch.Tensor], block_bytes: int = 1
) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes saved) of the same optimizer with smaller state, most saved first:
    "adamw-8bit" for "adamw". Empty for an unnamed optimizer. The arguments are those of
    `optimizer_state`."""
    own = state.name.lower()
    if own not in OPTIMIZERS:
        return ()
    listed, own_bytes = list(parameters), state.bytes_total - state.count_bytes
    found = [
        (other, own_bytes - optimizer_state(other, listed, block_bytes).bytes_total)
        for other in OPTIMIZERS
        if other != own and other.partition("-")[0] == own.partition("-")[0] != "sgd"
    ]
    return tuple(sorted((row for row in found if row[1] > 0), key=lambda row: -row[1]))


def _named(name: str, elements: int, element_bytes: int) -> list[tuple[str, int]]:
    if name == "sgd":
        return []
    if name == "sgd-momentum":
        return [("momentum", elements * element_bytes)]
    if name in ("adam", "adamw"):
        return [(moment, elements * element_bytes) for moment in ("exp_avg", "exp_avg_sq")]
    if name.endswith("-fp32") or elements < _8BIT_SMALLEST:
        state = [("exp_avg (fp32)", 4 * elements), ("exp_avg_sq (fp32)", 4 * elements)]
        if name.endswith("-fp32") and element_bytes < 4:
            state.append(("master parameters (fp32)", 4 * elements))
        return state
    scales = 4 * -(-elements // _8BIT_BLOCK)
    return [("exp_avg (8 bit)", elements + scales), ("exp_avg_sq (8 bit)", elements + scales)]


def _of_instance(
    optimizer: torch.optim.Optimizer, block_bytes: int, device: torch.device | None
) -> OptimizerState:
    """Return the present state, or else the state that the class will make at its first step."""
    name = type(optimizer).__name__
    total = counts = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                sizes = state_sizes(optimizer, group, parameter)
                counted = _count_sizes(optimizer, group, parameter, device)
                total += _in_blocks(sizes + counted, block_bytes)
                counts += _in_blocks(counted, block_bytes)
    return OptimizerState(name, total, ((f"{name} state", total),) if total else (), counts)


def state_bytes(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    block_bytes: int,
) -> int:
    """Return the bytes that an optimizer keeps for a parameter where the parameter lies."""
    sizes = state_sizes(optimizer, group, parameter)
    return _in_blocks(sizes + _count_sizes(optimizer, group, parameter), block_bytes)


def _in_blocks(sizes: list[int], block_bytes: int) -> int:
    return sum(in_blocks(size, block_bytes) for size in sizes)


def _count_sizes(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    device: torch.device | None = None,
) -> list[int]:
    """Return bytes of each count of steps that lies where the parameter is updated: on the CPU, and
    on another device where the optimizer is fused or capturable."""
    held, where = optimizer.state.get(parameter), device or local_part(parameter).device
    if held:
        counts = [v for k, v in _tensors_in(held) if not _has_state(k, v, parameter)]
        return [local_part(v).nbytes for v in counts if v.device == where]
    there = where.type == "cpu" or group.get("capturable") or group.get("fused")
    if not there or isinstance(optimizer, torch.optim.SGD):
        return []
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    # NAdam counts a product, too.
    return [8 if wide else 4] * (1 + isinstance(optimizer, torch.optim.NAdam))


def _tensors_in(held: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a parameter's state, also of lists in it (LBFGS's history, SOAP's
    matrices) and of objects (GaLore's projectors)."""
    if isinstance(held, torch.Tensor):
        yield name, held
    elif isinstance(held, Mapping):
        for key, value in held.items():
            yield from _tensors_in(value, str(key))
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from _tensors_in(value, name)
    else:
        attributes = getattr(held, "__dict__", {}).items()
        yield from ((key, value) for key, value in attributes if isinstance(value, torch.Tensor))


def _has_state(name: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a tensor is state of a parameter rather than a count of its steps. (Counts
    have no dimensions, nor has the state of a parameter without dimensions.)"""
    return bool(value.dim()) or (not parameter.dim() and name != "step")


def state_sizes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> list[int]:
    """Return bytes of each state tensor of a parameter, without its counts of steps."""
    held = optimizer.state.get(parameter)
    if held:
        state = [v for k, v in _tensors_in(held) if _has_state(k, v, parameter)]
        return [local_part(v).untyped_storage().nbytes() for v in state]
    kind = type(optimizer)
    if kind not in PER_PARAMETER:
        raise ValueError(
            f"memopt does not know what state {kind.__name__} keeps before its first step; run one "
            f"step before planning, or name one of {', '.join(OPTIMIZERS)}"
        )
    return [local_part(parameter).nbytes] * PER_PARAMETER[kind](group)
