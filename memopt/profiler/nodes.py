"""What the nodes of a captured graph call."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from memopt.profiler.as_eager.operators import Substitute

_NEVER_DRAWS = frozenset({"aten._scaled_dot_product_flash_attention_for_cpu.default"})
"""Tagged as random, like its relatives, but without dropout: it refuses any."""


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers."""
    target = overload_of(node)
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
        and str(target) not in _NEVER_DRAWS
    )


def overload_of(node: Node) -> Any:
    """A node's target; the operator that it stands for, if it is memopt's own form of one."""
    target = node.target
    return target.function if isinstance(target, Substitute) else target
