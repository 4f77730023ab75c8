"""What can be seen of a setting at one moment, and where two such views differ."""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import io
import queue
import random
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tests.surroundings.situation import Setting

Seen = Any
_PLAIN = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device)


def seen(value: Any, depth: int = 0) -> Seen:
    """A value as plain data: copies of tensors with what autograd says of them."""
    if isinstance(value, Tensor):
        if is_lazy(value):
            return type(value).__name__
        if value.layout != torch.strided:
            value = value.to_dense()
        plain = value.detach().as_subclass(Tensor).clone()
        return {"is": type(value).__name__, "value": plain, "requires_grad": value.requires_grad}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.ndarray):
        return {"is": "ndarray", "value": torch.from_numpy(value.copy())}
    if isinstance(value, (np.generic, enum.Enum)):
        return repr(value)
    if depth > 5:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {_name(k): seen(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [seen(v, depth + 1) for v in value]
    if isinstance(value, Set):
        return sorted(repr(seen(v, depth + 1)) for v in value)
    return _object(value, depth)


def _name(key: Any) -> str:
    return repr(key) if isinstance(key, _PLAIN) else type(key).__name__


def _object(value: Any, depth: int) -> Seen:
    if isinstance(value, io.StringIO):
        return value.getvalue()
    if isinstance(value, queue.Queue):
        return [seen(v, depth + 1) for v in value.queue]
    if isinstance(value, contextvars.ContextVar):
        return seen(value.get(), depth + 1)
    if isinstance(value, torch.Generator):
        return {"state": value.get_state()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return {"is": type(value).__name__, **seen(fields, depth + 1)}
    return type(value).__name__


def _modules(model: nn.Module) -> Seen:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"parameter {name}"] = seen(parameter)
        found[f"gradient of {name}"] = seen(parameter.grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}"] = seen(buffer)
    for place, module in model.named_modules():
        found[f"{place} is training"] = module.training
        for name, value in vars(module).items():
            # What memopt itself adds is no part of the model.
            own = type(value).__module__.partition(".")[0] == "memopt"
            if not name.startswith("_") and name != "training" and not own:
                found[f"attribute {place}.{name}"] = seen(value, 2)
    return found


def _settings() -> Seen:
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "anomaly": torch.is_anomaly_enabled(),
        "nnpack": torch.backends.mkldnn.enabled,
    }


def randomness() -> Seen:
    """The states of the three global generators."""
    numpy = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": repr(random.getstate()),
        "numpy": repr([np.asarray(one).tolist() for one in numpy]),
    }


def everything(setting: Setting, optimizer: torch.optim.Optimizer, heard: Any) -> Seen:
    """All that the user owns."""
    state = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return {
        "model": _modules(setting.model),
        "owned": [_modules(one) for one in setting.owned],
        "world": seen(setting.world()),
        "optimizer": seen(state),
        "random": randomness(),
        "settings": _settings(),
        "heard": seen(heard),
    }


def difference(expected: Seen, found: Seen, place: str = "") -> str:
    """The first place where two views differ, with both; "" where they are alike."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            ours, theirs = ((tuple(t.shape), t.dtype) for t in (found, expected))
            return f"{place}: {theirs} is {ours}"
        if not torch.equal(expected.nan_to_num(nan=7e7), found.nan_to_num(nan=7e7)):
            most = (expected.double() - found.double()).abs().max().item()
            return f"{place}: values differ by {most:.3g}"
        return ""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(k for k in found if k not in expected)]:
            if (key in expected) != (key in found):
                return f"{place}.{key}: only {'before' if key in expected else 'here'}"
            where = difference(expected[key], found[key], f"{place}.{key}".removesuffix(".value"))
            if where:
                return where
        return ""
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{place}: {len(expected)} entries are {len(found)}"
        pairs = zip(expected, found, strict=True)
        return next(
            filter(None, (difference(*p, f"{place}[{i}]") for i, p in enumerate(pairs))), ""
        )
    same = type(expected) is type(found) and (expected == found or expected != expected)
    short = [_short(one) for one in (expected, found)]
    return "" if same else f"{place}: {short[0]} is {short[1]}"


def _short(value: Seen) -> str:
    if isinstance(value, dict):
        return "a tensor" if "requires_grad" in value else "a dict"
    text = repr(value)
    return text if len(text) < 60 else text[:40] + "…" + text[-15:]
