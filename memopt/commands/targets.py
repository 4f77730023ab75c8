"""Models named on the command line: MODULE:FACTORY, FILE.py:FACTORY or hf:CONFIG.json."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memopt.commands.torchvision import REMEDY, without_broken_torchvision

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMS = (
    "name a model as MODULE:FACTORY or FILE.py:FACTORY, where FACTORY() returns (model, inputs) or "
    "(model, inputs, loss_fn), or as hf:CONFIG.json, a Hugging Face configuration on disk"
)


DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Names of the dtypes that a model may be trained in."""


class TargetError(Exception):
    """A model named on the command line cannot be made; the message has the remedy."""


@dataclass(frozen=True)
class NamedModel:
    """A model with its example inputs and, if known, its loss."""

    model: nn.Module
    inputs: Any
    loss_fn: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Hugging Face model's inputs (a factory chooses its own), and a model's dtype."""

    batch: int = 4
    sequence: int = 128
    meta: bool = False
    dtype: str | None = None


def load_target(name: str, sizes: Sizes | None = None) -> NamedModel:
    """Make the model of a name; the user's folder is searched for modules first.

    Raises:
        TargetError: the module, the factory or its result is not usable.
    """
    kind, _, rest = name.partition(":")
    sizes = sizes or Sizes()
    if kind == "hf":
        return load_config(rest, sizes)
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise TargetError(f"{name!r} names no model: {FORMS}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(module_name)
    factory: Any = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise TargetError(f"{module_name} has no {attribute!r}: {FORMS}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise TargetError(f"{name} is not a function: {FORMS}")
    made = _called(name, factory)
    return made if sizes.dtype is None else _in_dtype(made, sizes.dtype)


def _import(module_name: str) -> ModuleType:
    try:
        with redirect_stdout(sys.stderr):
            if module_name.endswith(".py"):
                return _import_file(Path(module_name))
            return importlib.import_module(module_name)
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.split(".")[0] == error.name.split(".")[0]:
            raise TargetError(
                f"there is no module {module_name!r} in {Path.cwd()} or among the installed "
                "packages: run memopt in the folder of your code, or name a FILE.py:FACTORY"
            ) from error
        raise TargetError(f"importing {module_name} fails: {_last_line(error)}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise TargetError(f"importing {module_name} fails: {_last_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path} (looked from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # An import would do this, too: dataclasses and pickling look a module up by its name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _called(name: str, factory: Callable[..., Any]) -> NamedModel:
    try:
        with redirect_stdout(sys.stderr):  # standard output is the command's
            made = factory()
    except (Exception, SystemExit) as error:  # a user's factory may raise anything
        raise TargetError(
            f"{name}() fails: {_last_line(error)}. It is called without arguments and returns "
            "(model, inputs) or (model, inputs, loss_fn)"
        ) from error
    from torch import nn

    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        shown = type(made).__name__
        if isinstance(made, tuple):
            shown = f"({', '.join(type(item).__name__ for item in made)})"
        raise TargetError(
            f"{name}() returned {shown}; it must return (model, inputs) or "
            "(model, inputs, loss_fn), the model an nn.Module"
        )
    return NamedModel(*made)


def _in_dtype(target: NamedModel, name: str) -> NamedModel:
    """Cast the floating-point tensors of the model and its inputs to this dtype."""
    import torch

    from memopt.torch_private import pytree

    dtype = getattr(torch, name)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    inputs = pytree.tree_map_only(torch.Tensor, cast, target.inputs)
    return NamedModel(target.model.to(dtype), inputs, target.loss_fn)


def _last_line(error: BaseException) -> str:
    """Format an error, and the place in the user's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = ("<frozen", __file__)
    own = [frame for frame in frames if not frame.filename.startswith(inside)]
    own = [frame for frame in own if "site-packages" not in frame.filename] or own
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}{where}"


_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")


def load_config(name: str, sizes: Sizes) -> NamedModel:
    """Make the model of a config.json (or of a folder that holds one), with random weights.

    Its class is the first known one of the configuration's `architectures`, else a causal language
    model; its dtype is the configuration's, unless `sizes` names one. Inputs are random token ids
    (batch, sequence), or images (batch, channels, height, width), with the labels that the class's
    head wants; the loss is the model's own.

    Raises:
        TargetError: the file, transformers or the model class is missing.
    """
    with without_broken_torchvision() as fault:
        return _loaded(name, sizes, fault)


def _loaded(name: str, sizes: Sizes, fault: str | None) -> NamedModel:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise TargetError(
            "hf: needs Hugging Face transformers: pip install transformers"
        ) from error
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    fields = _read(path)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"{path}: model_type is {model_type!r}, which this transformers "
            f"({transformers.__version__}) does not have"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        if hasattr(config, "use_cache"):
            # Training needs no key-value cache, which as an output would stay in memory.
            config.use_cache = False
        dtype = _dtype(sizes.dtype or getattr(config, "dtype", None))
        with torch.device("meta" if sizes.meta else "cpu"), default_dtype(dtype):
            model = _build(transformers, config)
    except Exception as error:  # a model class may raise anything for a wrong configuration
        raise TargetError(not_built(path, error, fault)) from error
    return NamedModel(model.train(), _inputs(model, config, sizes), _own_loss)


def _dtype(named: Any) -> torch.dtype:
    """Return the dtype of a name or a configuration; torch's default if there is none."""
    import torch

    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else torch.get_default_dtype()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make this the dtype of new floating-point tensors inside, unless they name another."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def not_built(path: Path, error: BaseException, fault: str | None) -> str:
    """Write a message with the first cause of a failure, which transformers hides for imports."""
    text = f"{path}: transformers cannot build this model: {_first_line(error)}"
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if root is not error:
        text += f" The cause: {type(root).__name__}: {_first_line(root)}"
    if fault is not None:
        text += f" torchvision is installed but cannot be imported ({fault}): {REMEDY}"
    return text


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TargetError(f"{path} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TargetError(f"{path} is no Hugging Face configuration")
    return fields


def _build(transformers: Any, config: Any) -> Any:
    for architecture in config.architectures or ():
        kind = getattr(transformers, architecture, None)
        if kind is not None:
            return kind(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _inputs(model: Any, config: Any, sizes: Sizes) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    classes = max(1, getattr(config, "num_labels", 1))
    one_each = torch.randint(classes, (sizes.batch,), generator=generator)
    head = type(model).__name__
    if head.endswith(_CLASSIFIERS):
        # The model's loss would set this at its first call.
        config.problem_type = config.problem_type or "single_label_classification"
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (sizes.batch, getattr(config, "num_channels", 3), height, width)
        pixels = torch.randn(shape, generator=generator).to(model.dtype)
        return {"pixel_values": pixels, "labels": one_each}
    longest = getattr(config, "max_position_embeddings", None) or sizes.sequence
    tokens = (sizes.batch, min(sizes.sequence, longest))
    ids = torch.randint(config.get_text_config().vocab_size, tokens, generator=generator)
    if head.endswith(_CLASSIFIERS):
        return {"input_ids": ids, "labels": one_each}
    if head.endswith("ForTokenClassification"):
        return {"input_ids": ids, "labels": torch.randint(classes, tokens, generator=generator)}
    return {"input_ids": ids, "labels": ids.clone()}


def _own_loss(output: Any) -> Any:
    if getattr(output, "loss", None) is None:
        raise TargetError(
            "this Hugging Face class computes no loss; name one with a head in `architectures`, "
            "or write a factory that returns (model, inputs, loss_fn)"
        )
    return output.loss
