"""Models from a Hugging Face configuration on disk: random weights, no downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memopt.commands.target import Sizes, Target, TargetError
from memopt.commands.torchvision import REMEDY, without_broken_torchvision

_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")


def load_config(name: str, sizes: Sizes) -> Target:
    """The model of a config.json (or of a folder that holds one), with random weights.

    Its class is the first of the configuration's `architectures`, else a causal language model.
    Inputs are random token ids (batch, sequence), or images (batch, channels, size, size), with
    the labels that the class's head wants; the loss is the model's own.

    Raises:
        TargetError: the file, transformers or the model class is missing.
    """
    with without_broken_torchvision() as fault:
        return _loaded(name, sizes, fault)


def _loaded(name: str, sizes: Sizes, fault: str | None) -> Target:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise TargetError(
            "hf: needs Hugging Face transformers: pip install memopt[notebooks]"
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
            # Training needs no key-value cache, which the model would return and so hold.
            config.use_cache = False
        with torch.device("meta" if sizes.meta else "cpu"):
            model = _build(transformers, config)
    except Exception as error:  # whatever a model class makes of a wrong configuration
        raise TargetError(not_built(path, error, fault)) from error
    return Target(model.train(), _inputs(model, config, sizes), _own_loss)


def not_built(path: Path, error: BaseException, fault: str | None) -> str:
    """What fails and what it comes from: transformers hides the cause of a failed import."""
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
        # What the model's loss would set at its first call.
        config.problem_type = config.problem_type or "single_label_classification"
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (sizes.batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator), "labels": one_each}
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
