"""Python state that a forward changes and a planned step would not: found, and refused by name.

Dynamo lists the objects that the traced forward changes; the graph has only the tensor part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from memopt.errors import CaptureError
from memopt.profiler.inputs import Call
from memopt.profiler.restored_state import state_restored

_ROOT = "L['self']._modules['_export_root']"
_BUFFERS = "._buffers"


def check_side_effects(model: nn.Module, call: Call, changed: Iterable[str]) -> None:
    """Raise unless a planned step leaves behind what the forward would.

    Args:
        model: the user's model.
        call: the captured call.
        changed: dynamo's names of the objects that the forward changes.

    Raises:
        CaptureError: it sets attributes of the model or its inputs, or assigns a buffer anew.
    """
    # Globals are left out: libraries set and reset context variables there.
    names = [_python_name(source) for source in changed if source.startswith("L[")]
    if names and all(name.endswith(_BUFFERS) for name in names):
        # `self.buffer += 1` assigns the same tensor again: only the update counts.
        names = _assigned_buffers(model, call)
    if names:
        raise CaptureError(
            f"the forward changes Python state of {', '.join(names)}, which a planned step would "
            "leave as it is. Return such values as outputs; update buffers in place "
            "(self.buffer.copy_(...)) instead of assigning them; if this is a cache that the first "
            "call builds, call the model once before planning"
        )


def _python_name(source: str) -> str:
    """`L['self']._modules['_export_root']._modules['i']._buffers` → `model.i._buffers`."""
    path = source.replace(_ROOT, "model")
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    return re.sub(r"^L\['flat_args'\]", "inputs", path)


def _assigned_buffers(model: nn.Module, call: Call) -> list[str]:
    """Buffers that hold another tensor after one forward on fake tensors (nothing is computed)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules = [(name, module._buffers) for name, module in model.named_modules()]
    fakes: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in fakes:
            fakes[id(value)] = mode.from_tensor(value)
        return fakes[id(value)]

    with state_restored(model, call):
        for _, buffers in modules:
            buffers.update({name: fake(value) for name, value in buffers.items()})
        given = [dict(buffers) for _, buffers in modules]
        args, kwargs = pytree.tree_map(fake, (call.args, call.kwargs))
        with mode:
            model(*args, **kwargs)
        return [
            ".".join(filter(None, ("model", path, name)))
            for (path, buffers), old in zip(modules, given, strict=True)
            for name in buffers
            if buffers[name] is not old.get(name)
        ]
