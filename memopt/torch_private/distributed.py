"""Process groups, and DTensors in traces."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from memopt.torch_private.access import optional, patched, private, replace

_GROUP = "torch.distributed.ProcessGroup"
_RUN = "torch.autograd._engine_run_backward"
_TRIES_OUT = (
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached"
)
_NAMES = (
    f"{_GROUP}._get_backend",
    f"{_GROUP}._device_types",
    "torch._C._distributed_c10d.Backend.Options._timeout",
)


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a group's collectives wait for a rank; None: torch's own default."""
    if group is None or any(optional(name) is None for name in _NAMES):
        return None
    try:
        backends = [group._get_backend(kind) for kind in group._device_types]
    except RuntimeError:  # a group such as the fake one has no backend for a device
        return None
    options = (getattr(one, "options", None) for one in backends)  # not every backend has options
    known = (getattr(one, "_timeout", None) for one in options)
    return next((found for found in known if found is not None), None)


@contextlib.contextmanager
def nothing_tried_out() -> Iterator[None]:
    """Trace without what torch tries out when it first meets a DTensor's operator, as 2.13 does."""
    if "torch.distributed.tensor" not in sys.modules:
        yield
        return
    tried_out = private(_TRIES_OUT)
    untraced = private("torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing")

    def unseen(*given: Any) -> Any:
        with untraced():
            return tried_out(*given)

    with patched(_TRIES_OUT, unseen):
        yield


_FAILED: list[Callable[[Exception], BaseException]] = []
"""What is called if this process's next backward fails."""


def if_backward_fails(told: Callable[[Exception], BaseException]) -> None:
    """Have the next backward of this process raise what `told` makes of an error in it."""
    _tell_of_backwards()
    _FAILED[:] = [told]


@functools.cache
def _tell_of_backwards() -> None:
    run = private(_RUN)

    def runs(*args: Any, **kwargs: Any) -> Any:
        told = [*_FAILED]
        _FAILED.clear()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            for tell in told:
                if (instead := tell(error)) is not error:
                    raise instead from error
            raise

    replace(_RUN, runs)
