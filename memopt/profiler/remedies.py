"""Why a model of a known kind cannot be captured, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from memopt.errors import CaptureError
from memopt.profiler.inputs import Call

_GRAD = ("autograd.grad", "requires_grad_()", "does not require grad")


def known_remedy(model: nn.Module, error: Exception) -> str | None:
    """The sentence for a model that could not be captured; None if it is of no known kind."""
    for cause in _CAUSES:
        found = cause(model, str(error))
        if found is not None:
            return found
    return None


def inside_fabric(model: nn.Module) -> nn.Module | None:
    """The user's module in what Lightning Fabric's `setup` made of it; None: it made none."""
    if "_FabricModule" not in {kind.__name__ for kind in type(model).__mro__}:
        return None
    module: nn.Module = model.module  # type: ignore[assignment]
    return module


def check_outside_fabric(model: nn.Module) -> None:
    """Refuse what Lightning Fabric's `setup` made, which casts and redirects calls in Python.

    Raises:
        CaptureError: it is that.
    """
    if inside_fabric(model) is not None:
        raise CaptureError(
            "the model is what Fabric's setup made: call memopt.wrap(model, budget=...), which "
            "takes it, or plan the module inside (model.module)"
        )


def is_data_parallel(model: nn.Module) -> bool:
    """Whether the model is wrapped to exchange gradients, by hooks that no plan holds."""
    return _is_a(model, "DistributedDataParallel", "DataParallel")


def _is_a(model: nn.Module, *names: str) -> bool:
    """Whether the model's class, or one that it is derived from, has one of the names."""
    return any(kind.__name__ in names for kind in type(model).__mro__)


def _wrapped(model: nn.Module, _text: str) -> str | None:
    if is_data_parallel(model):
        return (
            f"the model is a {type(model).__name__} already, which exchanges gradients outside of "
            "any graph: plan first, then wrap "
            "(DistributedDataParallel(memopt.wrap(model, budget=...)))"
        )
    if _is_a(model, "FSDPModule", "FullyShardedDataParallel"):
        return (
            "the model's parameters are sharded, and gathered by hooks that no plan holds: "
            "memopt.shard(model, mesh) in place of fully_shard has the gathering in the plan; or "
            "plan first, and shard what is planned, the model or each block of it: "
            "fully_shard(memopt.plan(block, inputs, budget=...).apply(block))"
        )
    return None


def _checkpointed(model: nn.Module, _text: str) -> str | None:
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    undo = "model.gradient_checkpointing_disable()"
    if any(_asks_for_gradients(model)):
        undo += " and model.disable_input_require_grads()"
    return f"switch gradient checkpointing off ({undo}): memopt replaces it, within your budget"


def _asks_for_gradients(model: nn.Module) -> Iterator[bool]:
    for module in model.modules():
        for hook in module._forward_hooks.values():
            yield "make_inputs_require_grads" in getattr(hook, "__qualname__", "")


def _inputs_require_gradients(model: nn.Module, _text: str) -> str | None:
    if not any(_asks_for_gradients(model)):
        return None
    return (
        "a hook lets the embeddings' output require gradients, which gradient checkpointing needs "
        "and memopt, which replaces it, does not: call model.disable_input_require_grads(), or, "
        "where adding an adapter has left a second hook, load the model without checkpointing"
    )


def _differentiates(_model: nn.Module, text: str) -> str | None:
    if not any(words in text for words in _GRAD):
        return None
    return (
        "the forward calls torch.autograd.grad (or backward) itself, which one graph cannot hold: "
        "use torch.func.grad or torch.func.vjp there, or plan the sub-modules that it calls"
    )


def _drawn_in_python(model: nn.Module, text: str) -> str | None:
    """Speech models of Hugging Face's: each of their settings that no graph can hold, at once."""
    config = getattr(model, "config", None)
    undo = [
        f"set model.config.{name} = 0"
        for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
        if (getattr(config, name, 0) or 0) > 0
    ]
    if getattr(config, "apply_spec_augment", False) and hasattr(model, "freeze_feature_encoder"):
        undo.append("set model.config.apply_spec_augment = False")
    undo += [
        f"set model.{name}._requires_grad = False (its inputs need no gradient)"
        for name, module in model.named_modules()
        if getattr(module, "_requires_grad", False) is True
    ]
    if not undo:
        return None
    if "labels" in text:
        undo.append("call it without labels and compute the loss from its outputs")
    return (
        "the model draws layers or masks in Python, or looks at values, in every step, which one "
        f"graph cannot hold: {', '.join(undo)}"
    )


def _quantized(model: nn.Module, text: str) -> str | None:
    """torch.ao's observers and fake quantizers, which dynamo leaves out of every graph."""
    if "skipped" not in text:
        return None
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.quantization"):
            return (
                f"the model has torch.ao's {type(module).__name__} ({name!r}), which torch traces "
                'into no graph: torch.compile(model, backend="memopt", options={"budget": ...}) '
                "plans the parts between such modules; or quantize in the forward by "
                "torch.fake_quantize_per_channel_affine, which a plan of the whole can hold"
            )
    return None


_CAUSES: tuple[Callable[[nn.Module, str], str | None], ...] = (
    _wrapped,
    _checkpointed,
    _inputs_require_gradients,
    _differentiates,
    _drawn_in_python,
    _quantized,
)


def without_labels(call: Call) -> str:
    """What to do where it is the model's own loss that cannot be captured; "" if it has none."""
    if call.kwargs.get("labels") is None:
        return ""
    return (
        ". If that is the loss that the model computes itself, call it without labels and compute "
        "the loss from its outputs"
    )
