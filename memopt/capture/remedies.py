"""Explains why models of known kinds cannot be captured, each with its remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from memopt.capture.own_loss import loss_arguments
from memopt.capture.remedies_of_python import SAID_OF_PYTHON
from memopt.errors import CaptureError
from memopt.step.inputs import Call
from memopt.torch_private.engine_hooks import has_engine
from memopt.torch_private.modules import forward_hooks_of

_DRAW_MASKS = ("_mask_hidden_states", "_mask_input_features")
"""Methods of Hugging Face's speech models: Wav2Vec2's kin has the first, Whisper the second."""

_GRAD = ("autograd.grad", "Tensor.backward()", "does not require grad")

_SAID: tuple[tuple[str, str], ...] = (
    (
        r"in get_rope_index\b",
        "it computes the positions of its tokens in Python, out of their values: call its "
        "get_rope_index before, where batches are put together, and pass the model what that "
        "returns first as position_ids",
    ),
    (
        r"element of type Sym(Int|Float|Bool)|SymIntArrayRef expected to contain only concrete"
        r"|SymNodeVariable\(\) is not a constant",
        "it reads a size or a factor out of a tensor (.item(), int(x), or a tensor given as one), "
        "which no graph can hold: pass it as a Python number, which is part of the plan, or make "
        "the part around it one operator (memopt.opaque), or plan the sub-modules around it",
    ),
    (
        r"in as_autograd_function\b",
        "it calls memopt.opaque itself: call that once, outside of the forward "
        "(function = memopt.opaque(function)), and its result in the forward",
    ),
    (
        r"as_proxy\(\)[^\0]*UserDefinedObjectVariable\(Generator\)",
        "it draws from a torch.Generator, whose state no graph holds: draw without generator= "
        "(torch.manual_seed seeds torch's own), or pass what is drawn as an input",
    ),
    (
        r"as_proxy\(\)[^\0]*NNModuleVariable",
        "it gives a module to an opaque function (memopt.opaque) or a custom autograd function: "
        "give it the module's parameters, tensors by themselves",
    ),
    (
        r"of class `(Generator|RandomState)`|\b(np|numpy)\.random\b",
        "it draws or seeds random numbers in numpy, which no graph does: draw them in torch "
        "(torch.rand, torch.randint), or pass them as a tensor",
    ),
    (
        r"(RandomValueSource|\bRandom\.[a-z]+)[^\0]*<@beartype\(",
        "beartype draws random numbers to check its arguments: switch its checks off "
        "(BeartypeConf(strategy=BeartypeStrategy.O0)), or leave this forward undecorated",
    ),
    (
        r"RandomValueSource|\bRandom\.[a-z]+",
        "it draws random numbers in Python, which a graph would hold as constants: draw them in "
        "torch (torch.empty(()).uniform_(a, b), torch.randint; torch.where chooses by them), or "
        "pass them as a tensor",
    ),
    (
        r"`(manual_seed|seed|[gs]et_rng_state)` in file|\bfork_rng\b",
        "it seeds torch or sets its random state aside (torch.manual_seed, fork_rng), which a "
        "planned step would not: do that around the call of the model, or draw there and pass what "
        "is drawn as an input",
    ),
    (
        r"DataPtrVariable",
        "it reads where a tensor lies in memory (data_ptr()), which differs from step to step: "
        "tell tensors apart by `is`, and keep what is kept of them under names of your own",
    ),
    (
        r"torch/distributions/\w+\.py",
        "torch.distributions checks the values of its parameters, which no graph inside a graph "
        "can: take them out of the checkpoint or transform, make "
        "distributions with validate_args=False, or call "
        "torch.distributions.Distribution.set_default_validate_args(False) once",
    ),
    (
        r"torch/ao/quantization/\w+\.py",
        "no graph holds this observer or fake quantizer of torch.ao's, which sizes its buffers or "
        "asks whether it is on in every forward: take the fused ones "
        "(get_default_qat_qconfig(), FusedMovingAvgObsFakeQuantize), or plan the sub-modules "
        "around it",
    ),
    (
        r"unrecognized type UserDefinedObjectVariable\((?P<what>\w+)\) at output",
        "it returns a {what}, which is no container of tensors: return a tuple or a dict (of a "
        "distribution its parameters, and make it of them outside), or register your own class "
        "with torch.export.register_dataclass",
    ),
    (
        r"Found <class '(?P<what>[\w.]+)'> in output, which is not a known type",
        "it returns a {what} beside its tensors, or keeps one in a list or dict that it makes, "
        "which a graph does not: leave it out there, or take numbers or a text in its place",
    ),
    (
        r"Encountered unrecognized type SetVariable",
        "it takes or returns a set, whose order a graph cannot know: use a list or a tuple",
    ),
    (
        r"torch\.distributed\.nn\.functional\.(?P<what>\w+) is not supported under torch\.compile",
        "it calls torch.distributed.nn.functional.{what}, which no graph holds: write it with "
        "all_gather, all_reduce or all_to_all_single of that module, which a plan holds, or call "
        "it outside of the model",
    ),
    (
        r"async_op=True for distributed collectives|async_op=True. for",
        "it calls a collective of torch.distributed with async_op=True, which no graph holds: "
        "leave that out, since a plan starts collectives early by itself",
    ),
    (
        r"set_ on a graph input|mutate tensors with frozen storage",
        "it assigns .data of a parameter, a buffer or an input, which gives it other memory: "
        "update the values in place instead (with torch.no_grad(): weight.copy_(...))",
    ),
    (
        r"non-contiguous `out=`",
        "an operator writes to a tensor with gaps or in another order (out=): use what it returns, "
        "or copy that there (out.copy_(torch.mm(a, b)))",
    ),
    (
        r"torch\.nn\.Parameter\(\)",
        "it makes an nn.Parameter: make it in __init__, or use a plain tensor",
    ),
    (
        r'nn/modules/module\.py", line \d+, in requires_grad_\b',
        "it freezes a module's parameters, or lets them train (requires_grad_), which a planned "
        "step would not: do that between steps, outside of the model; a part that is to get no "
        "gradient in this forward runs under torch.no_grad()",
    ),
    (
        r"Tensor\.requires_grad_\(\)|intermediate with requires_grad_",
        "it calls requires_grad_(): do that before the call, or leave it out, or plan the "
        "sub-modules that it calls; where it is for torch.autograd.grad, a tensor of the forward's "
        "own will do from torch 2.13 on (x.detach().requires_grad_(), not returned)",
    ),
    (
        r"builtin operator `print`|`_warnings\.warn`|`TextIOWrapper`|LoggingLogger"
        r"|/logging/__init__\.py",
        "it prints, logs or warns, which a graph does not: do that in the training loop",
    ),
    (
        r"numpy_(operator|method|to_tensor)_wrapper|_dynamo_utils_wrapped_",
        "it computes with numpy arrays, which a planned step would not change: keep them as "
        "buffers (register_buffer), and compute with tensors",
    ),
    (
        r"Pending unbacked symbols|NumpyNdarrayVariable|NumpyTensorSource"
        r"|target: <Wrapped method <original item>>",
        "it reads a number out of a numpy array or a tensor, which no graph can hold: keep "
        "constants as Python numbers (made in __init__) or as buffers (register_buffer), and "
        "compute with tensors",
    ),
    (
        r"non-function __getattr__",
        "an object that it uses has a __getattr__ that is no function of Python's "
        "(dict.__getitem__): write it with def, or pass a plain dict",
    ),
    (
        r"multi_head_attention_forward[^\0]*nn/modules/transformer\.py",
        "torch's Transformer looks at a mask's values to see whether it is causal: say so, or not "
        "(is_causal=True of an encoder; tgt_is_causal=True of a decoder or nn.Transformer)",
    ),
    (
        r"_tensor_version|\._version\b",
        "it reads how often a tensor was changed (._version), which differs from step to step: "
        "take that out of the forward, or plan the sub-modules around it",
    ),
    (
        r"GetAttrVariable\(TensorVariable\(\), persistent\)",
        "it assigns an nn.Buffer to a module, which torch.compile puts into no graph: register it "
        "as a plain tensor (register_buffer(name, tensor)), or, where only the first call or a "
        "longer one does so, call the model once before planning, with its longest input",
    ),
    (
        r"[Dd]ata-dependent|tolist\(\)|_local_scalar_dense",
        "memopt needs a forward without data-dependent Python control flow (.item(), tensor truth "
        "values); rewrite that part with tensor operators (torch.where) or plan the sub-modules "
        "around it",
    ),
    *SAID_OF_PYTHON,
)
"""Pattern in an error's message → the cause and the remedy; the first match counts."""


def said_remedy(text: str) -> str | None:
    """Return the sentence for a message of dynamo's or AOTAutograd's; None if none is known."""
    for words, sentence in _SAID:
        found = re.search(words, text)
        if found is not None:
            return sentence.format(**found.groupdict())
    return None


def known_remedy(model: nn.Module, error: Exception) -> str | None:
    """Return the sentence for a model that could not be captured; None if no cause is known."""
    text = str(error)
    for cause in _CAUSES:
        found = cause(model, text)
        if found is not None:
            return found
    return None


def inside_fabric(model: nn.Module) -> nn.Module | None:
    """Return the user's module inside a model that Lightning Fabric's `setup` made; else None."""
    if "_FabricModule" not in {kind.__name__ for kind in type(model).__mro__}:
        return None
    module: nn.Module = model.module  # type: ignore[assignment]
    return module


def check_outside_fabric(model: nn.Module) -> None:
    """Refuse a model that Lightning Fabric's `setup` made, which redirects calls in Python.

    Raises:
        CaptureError: the model is one.
    """
    if inside_fabric(model) is not None:
        raise CaptureError(
            "the model is what Fabric's setup made: call memopt.wrap(model, budget=...), which "
            "takes it, or plan the module inside (model.module)"
        )


def is_data_parallel(model: nn.Module) -> bool:
    """Return whether the model is wrapped to exchange gradients, by hooks that no plan holds."""
    return _is_a(model, "DistributedDataParallel", "DataParallel")


def flattens(model: nn.Module) -> bool:
    """Return whether the model is a FullyShardedDataParallel."""
    return _is_a(model, "FullyShardedDataParallel")


def _is_a(model: nn.Module, *names: str) -> bool:
    """Return whether the model's class, or a base of it, has one of the names."""
    return any(kind.__name__ in names for kind in type(model).__mro__)


def _wrapped(model: nn.Module, _text: str) -> str | None:
    if is_data_parallel(model):
        return (
            f"the model is a {type(model).__name__} already, which exchanges gradients outside of "
            "any graph: plan first, then wrap "
            "(DistributedDataParallel(memopt.wrap(model, budget=...)))"
        )
    sharded = _is_a(model, "FSDPModule") and any(map(has_engine, model.modules()))
    if sharded or any(map(flattens, model.modules())):
        return (
            "the model's parameters are sharded, and gathered by hooks that no plan holds: of what "
            "fully_shard has sharded, memopt.wrap(model, budget=...) plans each module between its "
            "gatherings; memopt.shard(model, mesh) in place of fully_shard has the gathering in "
            "the plan, too (FullyShardedDataParallel: take fully_shard)"
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
        for hook in forward_hooks_of(module).values():
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
        "the forward differentiates in a way that no graph holds (backward(), which adds to "
        "gradients; torch.autograd.grad back into what was computed before the call): use "
        "torch.autograd.grad of what the forward computes itself, torch.func.grad or "
        "torch.func.vjp, or plan the sub-modules that it calls"
    )


def _drawn_in_python(model: nn.Module, _text: str) -> str | None:
    """Name each setting of Hugging Face's speech models that no graph can hold, at once."""
    config = getattr(model, "config", None)
    undo = [f"set {where}.{name} = 0" for where, name in _layers_left_out(model)]
    masks = any(hasattr(module, name) for module in model.modules() for name in _DRAW_MASKS)
    if masks and getattr(config, "apply_spec_augment", False):
        undo.append("set model.config.apply_spec_augment = False")
    undo += [
        f"set model.{name}._requires_grad = False (its inputs need no gradient)"
        for name, module in model.named_modules()
        if getattr(module, "_requires_grad", False) is True
    ]
    if not undo:
        return None
    return (
        "the model draws layers or masks in Python, or looks at values, in every step, which one "
        f"graph cannot hold: {', '.join(undo)}"
    )


def _layers_left_out(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the settings of how often layers are dropped: modules that copied theirs when they were
    made (as BART's), and configurations that are read in each step (as Wav2Vec2's)."""
    read: dict[int, tuple[str, object]] = {}
    copied = set()
    for name, module in model.named_modules():
        where, config = ".".join(("model", *filter(None, [name]))), getattr(module, "config", None)
        read.setdefault(id(config), (f"{where}.config", config))
        if hasattr(module, "layerdrop"):
            copied.add(id(config))
            if module.layerdrop:
                yield where, "layerdrop"
    for key, (where, config) in read.items():
        for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
            elsewhere = key in copied and name in ("encoder_layerdrop", "decoder_layerdrop")
            if name.endswith("layerdrop") and value and not elsewhere:
                yield where, name


def _checkpointed_in_parts(_model: nn.Module, text: str) -> str | None:
    if "checkpoint_sequential" not in text:
        return None
    return (
        "the forward calls torch.utils.checkpoint.checkpoint_sequential, which no graph holds: "
        "call the modules one after another instead, since memopt decides what is recomputed"
    )


_CAUSES: tuple[Callable[[nn.Module, str], str | None], ...] = (
    _wrapped,
    _checkpointed,
    _inputs_require_gradients,
    _differentiates,
    _drawn_in_python,
    _checkpointed_in_parts,
)


def said_of_selection(where: str) -> str | None:
    """Return the remedy for a selection by values at a library's line; None for others."""
    if re.search(r"torch_geometric/utils/loop\.py", where):
        return (
            "give the convolution add_self_loops=False, and its graph the loops before the call "
            "(torch_geometric.utils.add_self_loops)"
        )
    return None


def without_labels(model: nn.Module, call: Call, inside: Sequence[str]) -> str:
    """Return the remedy for a model whose own loss cannot be captured; "" if it has no loss, or if
    the failure is inside of sub-modules (the outermost first) that compute no loss."""
    given = loss_arguments(call)
    if not given or (inside and not _may_compute_loss(model.get_submodule(inside[-1]), given)):
        return ""
    return (
        f". If that is the loss that the model computes itself, call it without {', '.join(given)} "
        "and compute the loss from its outputs"
    )


def _may_compute_loss(module: nn.Module, given: Sequence[str]) -> bool:
    """Return whether a sub-module may be a loss, or takes the arguments of one."""
    takes = inspect.signature(type(module).forward).parameters
    return next(module.parameters(), None) is None or any(name in takes for name in given)
