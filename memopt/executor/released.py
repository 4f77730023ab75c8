"""Waits until a process group has released the tensors of a collective.

A collective on CPU (gloo) runs in a thread of the group, which holds its tensors until a moment
after those that wait for it go on. Freed meanwhile, they would stay in memory for that moment.
"""

from __future__ import annotations

import torch

from memopt.step.collectives import give_way
from memopt.torch_private.tensors import holders

_LONGEST_S = 1.0


def released(*tensors: torch.Tensor) -> None:
    """Wait until nothing but these tensors holds their storage, for a second at most.

    Args:
        tensors: all tensors that the caller has in one storage, on a device with the host's memory.
    """
    storage = tensors[0].untyped_storage()
    # A wait returns the tensor that it waited for.
    alone = len(set(map(id, tensors))) + 1
    give_way(lambda: holders(storage) <= alone, _LONGEST_S)
