"""Modules and optimizers: what they register, their hooks and calls."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from memopt.torch_private.access import (
    attribute,
    attribute_name,
    optional,
    patched,
    private,
)

BatchNorm: Any = private("torch.nn.modules.batchnorm._BatchNorm")
"""The base class of batch norms."""
parameters_of = attribute("torch.nn.Module._parameters")
"""The parameters that a module registers, by name."""
buffers_of = attribute("torch.nn.Module._buffers")
"""The buffers that a module registers, by name."""
modules_of = attribute("torch.nn.Module._modules")
"""The modules that a module registers, by name."""
forward_hooks_of = attribute("torch.nn.Module._forward_hooks")
"""The hooks after a module's forward, by number."""
_backward_hooks = attribute("torch.nn.Module._backward_hooks")
_backward_pre_hooks = attribute("torch.nn.Module._backward_pre_hooks")
FORWARD_PRE_HOOKS = attribute_name("torch.nn.Module._forward_pre_hooks")
"""The attribute that holds the hooks before a module's forward."""
TENSOR_REGISTRIES = (
    attribute_name("torch.nn.Module._parameters"),
    attribute_name("torch.nn.Module._buffers"),
)
"""The attributes that hold the tensors that a module registers."""
REGISTRIES = (
    *TENSOR_REGISTRIES,
    attribute_name("torch.nn.Module._modules"),
    attribute_name("torch.nn.Module._non_persistent_buffers_set"),
)
"""The attributes that hold everything that a module registers."""
registered_in = operator.attrgetter(TENSOR_REGISTRIES[0], REGISTRIES[2])
"""The parameters and the modules that a module registers, by name."""
COMPILED_CALL = attribute_name("torch.nn.Module._compiled_call_impl")
"""The attribute that holds the function that a module's call runs in place of its own code."""
OF_COMPUTED_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
"""The attributes that an RNN sets in each forward that finds its weights computed."""
private("torch.nn.RNNBase._init_flat_weights")
private("torch.nn.Module._call_impl")
private("torch.nn.utils.parametrize._cache_enabled")
private("torch.nn.Module._load_from_state_dict")
_step_hooks = (
    attribute("torch.optim.Optimizer._optimizer_step_pre_hooks"),
    attribute("torch.optim.Optimizer._optimizer_step_post_hooks"),
)
_ON_ALL_OPTIMIZERS = (
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
)
_ON_ALL_FORWARDS = (
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
)
_ON_ALL_BACKWARDS = (
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
)


def registered_parameter(module: Any, name: str) -> Any:
    """Return a parameter as a module registers it; traced by Dynamo."""
    return module._parameters[name]


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module's own code, with its hooks, even if its calls go elsewhere; for Dynamo."""
    return module._call_impl(*args, **kwargs)


def load_own_state(module: Any, *args: Any) -> None:
    """Load a module's own part of a state dict."""
    module._load_from_state_dict(*args)


def call_goes_elsewhere(module: nn.Module) -> bool:
    """Whether a module's call runs another function in place of its own code."""
    return getattr(module, COMPILED_CALL) is not None


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has full backward hooks."""
    return bool(_backward_hooks(module) or _backward_pre_hooks(module))


def _hooks_in(names: tuple[str, ...]) -> list[Any]:
    return [hook for name in names for hook in private(name).values()]


def hooks_on_all_forwards() -> list[Any]:
    """Return the hooks on the forwards of all modules."""
    return _hooks_in(_ON_ALL_FORWARDS)


def hooks_on_all_backwards() -> list[Any]:
    """Return the hooks on the backwards of all modules."""
    return _hooks_in(_ON_ALL_BACKWARDS)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has hooks on its steps."""
    return any(bool(hooks(optimizer)) for hooks in _step_hooks)


def hooks_on_all_optimizers() -> list[Any]:
    """Return the hooks on the steps of all optimizers."""
    return _hooks_in(_ON_ALL_OPTIMIZERS)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as having made a step; learning-rate schedulers warn otherwise."""
    if optional("torch.optim.Optimizer._opt_called") is not None:
        vars(optimizer)["_opt_called"] = True


def forget_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Reset a gradient scaler's state of an optimizer, as after an update."""
    private("torch.amp.GradScaler._per_optimizer_states")
    scaler._per_optimizer_states.pop(id(optimizer), None)


def grouped_by_dtype(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Group the positions of tensors on one device by dtype, in the order of the groups in
    `torch.nn.utils.clip_grad_norm_`."""
    grouped = private("torch.utils._foreach_utils._group_tensors_by_device_and_dtype")
    return [list(indices) for _, indices in grouped([tensors], with_indices=True).values()]


def parametrized_cached() -> bool:
    """Whether `torch.nn.utils.parametrize.cached()` is active."""
    return bool(parametrize._cache_enabled)


@contextlib.contextmanager
def parametrized_uncached() -> Iterator[None]:
    """Disable `torch.nn.utils.parametrize.cached()` inside."""
    with (
        patched("torch.nn.utils.parametrize._cache_enabled", 0),
        patched("torch.nn.utils.parametrize._cache", {}),
    ):
        yield


def data_parallel_around() -> Any:
    """Return the DistributedDataParallel whose forward is running; None: there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return private("torch.nn.parallel.DistributedDataParallel._get_active_ddp_module")()


def reducing_later() -> bool:
    """Whether the DistributedDataParallel whose forward is running leaves gradients to be reduced
    in a later step: it accumulates them (`no_sync`)."""
    around = data_parallel_around()
    return around is not None and not around.require_backward_grad_sync


def parameters_in(model: nn.Module) -> list[torch.Tensor]:
    """Return what `parameters()` does, several times faster."""
    found: dict[int, torch.Tensor] = {}
    seen, waiting = {id(model)}, [model]
    while waiting:
        module = waiting.pop()
        for parameter in parameters_of(module).values():
            if parameter is not None:
                found[id(parameter)] = parameter
        for child in modules_of(module).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return list(found.values())


@contextlib.contextmanager
def quantizers_traced() -> Iterator[None]:
    """Let Dynamo trace torch.ao's observers and fake quantizers, which it leaves out of graphs."""
    name = "torch._dynamo.trace_rules.get_mod_inlinelist"
    folders = private(name)() | {(Path(torch.__file__).parent / "ao/quantization").as_posix()}
    with patched(name, lambda: folders):
        yield


def makes_own_buffers(module: nn.Module) -> bool:
    """Whether the next forward of a module gives buffers their size: fake quantizers of torch.ao's
    and torchao's."""
    own = module.buffers(recurse=False)
    return ".quantization." in type(module).__module__ and any(x.numel() == 0 for x in own)
