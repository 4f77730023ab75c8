"""Stands in for autocast("cuda") in an estimate, whose fake tensors claim to be on the CPU.

Torch switches autocast("cuda") off where there is no CUDA; elsewhere it does not touch CPU tensors.
An estimate for CUDA therefore uses autocast("cpu") of the same dtype. The two differ in what they
keep in float32: CUDA's computes softmax, norms and losses in it, the CPU's only some losses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps

import torch

from memopt.torch_private.access import patched

TAKEN = (
    'autocast("cuda") is estimated with the casts of autocast("cpu"): softmax and norms, which '
    "CUDA computes in float32, are charged in {dtype}."
)
SWITCHED_OFF = (
    'on a machine without CUDA, torch switches autocast("cuda") off before memopt sees it, and '
    "does not say whether it was on: plan under "
    'torch.autocast("cpu", dtype={dtype}, enabled=...) for the estimate, '
    "whose casts stand for CUDA's"
)


@contextmanager
def autocast_for_cuda() -> Iterator[list[str]]:
    """Turn autocast("cuda") into autocast("cpu") of its dtype inside this context: the active one,
    and those that the model enters. Yields notes for the user, complete at the end.

    Raises:
        ValueError: torch has switched off an autocast("cuda") that surrounds this context.
    """
    original = torch.autocast.__init__
    notes: list[str] = []
    _check_not_switched_off()

    @wraps(original)
    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
            note = TAKEN.format(dtype=_name(dtype))
            if enabled and note not in notes:
                notes.append(note)
        original(self, device_type, dtype, enabled, cache_enabled)

    with ExitStack() as stack:
        stack.enter_context(patched("torch.autocast.__init__", on_cpu))
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cuda", torch.get_autocast_dtype("cuda")))
        yield notes


def _check_not_switched_off() -> None:
    active = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    if active or torch.cuda.is_available() or not _nesting():
        return
    # Torch counts the contexts entered, and keeps no list.
    dtype = torch.get_autocast_dtype("cuda")
    entered = (one for one in gc.get_objects() if type(one) is torch.autocast)
    if any((one.device, one.fast_dtype) == ("cuda", dtype) for one in entered):
        raise ValueError(SWITCHED_OFF.format(dtype=dtype))


def _nesting() -> int:
    """Return how many contexts of autocast, switched on or off, are active."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
