"""Waiting until a process group has let go of what a collective read and wrote.

A collective on CPU (gloo) is made by a thread of the group, which holds its tensors until a moment
after those that wait for it go on. Freed meanwhile, they would stay in memory for that moment.
"""

from __future__ import annotations

import time

import torch

_LONGEST_S = 0.01


def released(*tensors: torch.Tensor) -> None:
    """Return when nothing but these tensors holds their storage, or after a hundredth of a second
    (the user may hold it).

    Args:
        tensors: all that the caller has in one storage, of a device whose memory is the host's.
    """
    storage = tensors[0].untyped_storage()
    alone = len(tensors) + 1
    deadline = time.perf_counter() + _LONGEST_S
    while torch._C._storage_Use_Count(storage._cdata) > alone and time.perf_counter() < deadline:
        time.sleep(0)
