"""Copies of a model on meta with a few of its equal blocks: what an estimate needs to capture.

The estimate of the whole model is made from that of the copy; see `memopt.step.more_blocks`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from memopt.models.device import Device
from memopt.models.optimizer_names import update_s
from memopt.step.optimizer_state import OptimizerState, optimizer_state
from memopt.step.shards import local_part

KEPT = 4
"""Blocks that are captured: two to compare, and their neighbours."""
_NUMBERS = ("idx", "id", "index", "number")


@dataclass(frozen=True)
class BlockList:
    """A list of equal blocks in a model.

    Attributes:
        path: of the list, such as "model.layers".
        start: index of the first equal block.
        count: of the equal blocks.
        kept: how many a shallow copy has at most.
    """

    path: str
    start: int
    count: int
    kept: int = KEPT

    @property
    def more(self) -> int:
        """How many blocks a shallow copy lacks."""
        return max(0, self.count - self.kept)


def block_lists(model: nn.Module) -> tuple[BlockList, ...]:
    """Find the lists of blocks in a model: the outermost ones with at least two equal blocks that
    have modules of their own and share no parameter with other modules."""
    found: list[BlockList] = []
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _within(path, found):
            continue
        blocks = list(module)
        alone = [all(uses[id(p)] == 1 for p in block.parameters()) for block in blocks]
        kinds = [_kind(blocks[i]) if own else i for i, own in enumerate(alone)]
        start, count = _longest_run(kinds)
        own_modules = blocks and any(True for _ in blocks[start].children())
        if count >= 2 and own_modules:
            found.append(BlockList(path, start, count))
    return tuple(found)


def _within(path: str, found: Iterable[BlockList]) -> bool:
    return any(path.startswith(f"{one.path}.") for one in found)


def _longest_run(kinds: list[Hashable]) -> tuple[int, int]:
    best, start = (0, 0), 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            best = max(best, (start, i - start), key=lambda run: run[1])
            start = i
    return best


def _kind(block: nn.Module) -> Hashable:
    """Return the key by which blocks are equal: their modules, plain attributes and tensors."""
    return tuple(
        (
            name,
            type(module),
            tuple(_plain(module)),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in _tensors(module)),
        )
        for name, module in block.named_modules()
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _plain(module: nn.Module) -> Iterator[Hashable]:
    for name, value in sorted(vars(module).items(), key=lambda item: item[0]):
        if isinstance(value, bool | int | float | str | None) and not name.endswith(_NUMBERS):
            yield name, type(value), value


def meta_copy(model: nn.Module, lists: Iterable[BlockList] = ()) -> nn.Module:
    """Return a copy of a model on meta, with the equal blocks that these lists keep."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for _, tensor in _tensors(module):
            made: torch.Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo.setdefault(id(tensor), made)
    for one in lists:
        whole = model.get_submodule(one.path)
        assert isinstance(whole, (nn.ModuleList, nn.Sequential))
        end = one.start + one.count
        blocks = [*list(whole)[: end - one.more], *list(whole)[end:]]
        kept = nn.Sequential(*blocks) if isinstance(whole, nn.Sequential) else nn.ModuleList(blocks)
        kept.training = whole.training
        memo[id(whole)] = copy.deepcopy(kept, memo)
    return copy.deepcopy(model, memo)


@dataclass(frozen=True)
class WholeFigures:
    """What a whole model's parameters take, counted on its shallow copy.

    Attributes:
        parameter_bytes: of one rank, as the allocator counts them.
        trained_bytes: of those that get a gradient.
        trained: parameters that get a gradient, of one rank.
        state: the optimizer's.
    """

    parameter_bytes: int
    trained_bytes: int
    trained: int
    state: OptimizerState

    def update_s(self, device: Device) -> float:
        """Return the seconds of an update."""
        return update_s(self.state.name, self.trained_bytes, self.state.bytes_total, device)


def whole_figures(
    model: nn.Module,
    lists: Iterable[BlockList],
    optimizer: str | None,
    size_of: Callable[[torch.Tensor], int],
    block_bytes: int,
) -> WholeFigures:
    """Count a model's parameters and optimizer state from a copy without `more` of its blocks.

    Args:
        model: the copy.
        lists: its lists of blocks.
        optimizer: a name; None: no state.
        size_of: the bytes of one rank's part of a parameter.
        block_bytes: the allocator's granularity.
    """
    copies = [(model, 1)]
    for one in lists:
        blocks = model.get_submodule(one.path)
        assert isinstance(blocks, (nn.ModuleList, nn.Sequential))
        copies += [(blocks[one.start], one.more)] * bool(one.more)
    parts, sizes = Counter[str](), Counter[str]()
    for module, times in copies:
        parameters = list(module.parameters())
        for what, size in optimizer_state(optimizer, parameters, block_bytes).parts:
            parts[what] += times * size
        sizes["bytes"] += times * sum(map(size_of, parameters))
        trained = [p for p in parameters if p.requires_grad]
        sizes["trained"] += times * sum(local_part(p).numel() for p in trained)
        sizes["trained bytes"] += times * sum(map(size_of, trained))
    state = OptimizerState(optimizer or "none", parts.total(), tuple(parts.items()))
    return WholeFigures(sizes["bytes"], sizes["trained bytes"], sizes["trained"], state)
