"""Models from a Hugging Face configuration on disk: random weights, no downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memopt.commands.targets import Sizes, Target, TargetError


def load_config(name: str, sizes: Sizes) -> Target:
    """The model of a config.json (or of a folder that holds one), with random weights.

    Its class is the first of the configuration's `architectures`, else a causal language model.
    Inputs are random token ids (batch, sequence) with labels, or images (batch, channels, size,
    size); the loss is the model's own.

    Raises:
        TargetError: the file, transformers or the model class is missing.
    """
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
        with torch.device("meta" if sizes.meta else "cpu"):
            model = _build(transformers, config)
    except Exception as error:  # whatever a model class makes of a wrong configuration
        raise TargetError(
            f"{path}: transformers cannot build this model: {_first_line(error)}"
        ) from error
    if hasattr(config, "use_cache"):
        # Training needs no key-value cache, which the model would return and so hold.
        config.use_cache = False
    return Target(model.train(), _inputs(model, config, sizes), _own_loss)


def _first_line(error: Exception) -> str:
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
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (sizes.batch, getattr(config, "num_channels", 3), height, width)
        classes = max(1, getattr(config, "num_labels", 1))
        return {
            "pixel_values": torch.randn(shape, generator=generator),
            "labels": torch.randint(classes, (sizes.batch,), generator=generator),
        }
    longest = getattr(config, "max_position_embeddings", None) or sizes.sequence
    tokens = (sizes.batch, min(sizes.sequence, longest))
    ids = torch.randint(config.get_text_config().vocab_size, tokens, generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _own_loss(output: Any) -> Any:
    if getattr(output, "loss", None) is None:
        raise TargetError(
            "this Hugging Face class computes no loss; name one with a head in `architectures`, "
            "or write a factory that returns (model, inputs, loss_fn)"
        )
    return output.loss
