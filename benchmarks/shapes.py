"""Models that several benchmarks train or price: published shapes, and contests small enough for a
CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import Inputs, call, torchvision_shim  # the shim before transformers and torchvision
from tests.zoo.handwritten import UNet

VOCABULARY = 8192
SHAPES: dict[str, tuple[int, ...]] = {
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3-405b": (16384, 53248, 126, 128, 8, 128256, 8192),
}
"""Llama's published configurations, by SIZES."""
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def llama_of(*sizes: int, **changes: int) -> nn.Module:
    """Build a Llama of SIZES, or others by name, to train without a cache of keys and values, and
    with torch's attention."""
    import transformers

    shape: dict[str, Any] = {**dict(zip(SIZES, sizes, strict=True)), **changes}
    config = transformers.LlamaConfig(**shape, use_cache=False, attn_implementation="sdpa")
    return transformers.LlamaForCausalLM(config)


def llama(name: str, *, layers: int | None = None, **changes: int) -> nn.Module:
    """Build a Llama of one of the SHAPES, with all its layers or some."""
    return llama_of(*SHAPES[name], **({"num_hidden_layers": layers} if layers else {}), **changes)


def gpt2_of(**changes: Any) -> Any:
    """Build a GPT-2 of the published configuration, some of it changed."""
    import transformers

    config = transformers.GPT2Config(use_cache=False, attn_implementation="sdpa", **changes)
    return transformers.GPT2LMHeadModel(config)


class WithLoss(nn.Module):
    """`forward(*inputs, **inputs)` of the model, then the loss; returns the scalar only, so that
    the big output (logits) is the plan's to free, as it is eager's."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.loss(self.model(*args, **kwargs))


@dataclass(frozen=True)
class Contest:
    """A model, its inputs and loss, and where checkpointing would cut it.

    Attributes:
        model, module: the bare model, and with its loss: the only output is the scalar.
        blocks: what "one checkpoint per block" means for this model.
        sequence: the same model as one nn.Sequential; None where it is none.
    """

    name: str
    model: nn.Module
    module: WithLoss
    inputs: Inputs
    blocks: tuple[nn.Module, ...]
    sequence: nn.Sequential | None = None

    def step(self, module: nn.Module | None = None) -> None:
        """Run forward, loss and backward, random state set before."""
        torch.manual_seed(0)
        # A compiled module has no truth value.
        call(self.module if module is None else module, self.inputs).backward()


def _images(
    name: str, model: nn.Module, blocks: list[nn.Module], size: int, batch: int = 8
) -> Contest:
    classes = torch.arange(batch)
    module = WithLoss(model, lambda logits: functional.cross_entropy(logits, classes))
    sequence = model if isinstance(model, nn.Sequential) else None
    images = (torch.randn(batch, 3, size, size),)
    return Contest(name, model, module, images, tuple(blocks), sequence)


def resnet50() -> Contest:
    """torchvision's ResNet-50 as a sequence, 8 images of 128 x 128."""
    torchvision_shim.declare_missing_operators()
    from torchvision import models

    whole = models.resnet50()
    # One module: a segment must not start at the stem's in-place ReLU, which overwrites its input.
    stem = nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool)
    blocks = [*whole.layer1, *whole.layer2, *whole.layer3, *whole.layer4]
    model = nn.Sequential(stem, *blocks, whole.avgpool, nn.Flatten(1), whole.fc)
    return _images("ResNet-50, 8 x 128", model, blocks, 128)


def vit() -> Contest:
    """A ViT-B/16 reduced to d = 384: 12 layers, 8 images of 96 x 96."""
    torchvision_shim.declare_missing_operators()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(96, 16, 12, 6, 384, 1536, dropout=0.1)
    return _images("ViT/16, d=384, 8 x 96", model, list(model.encoder.layers), 96)


def unet() -> Contest:
    """The zoo's U-Net, width 16, 4 images of 128 x 128: long skip connections."""
    model = UNet(16)
    target = torch.randint(0, 2, (4, 128, 128))
    parts = tuple(m for m in model.modules() if isinstance(m, nn.Sequential))
    module = WithLoss(model, lambda output: functional.cross_entropy(output, target))
    return Contest("U-Net, width 16, 4 x 128", model, module, (torch.randn(4, 3, 128, 128),), parts)


def _language(name: str, model: nn.Module, layers: Any, vocabulary: int = VOCABULARY) -> Contest:
    ids = torch.randint(0, vocabulary, (4, 128))

    def loss(output: Any) -> Tensor:
        logits = output.logits[:, :-1].reshape(-1, vocabulary)
        return functional.cross_entropy(logits, ids[:, 1:].reshape(-1))

    return Contest(name, model, WithLoss(model, loss), {"input_ids": ids}, tuple(layers))


def gpt2(vocabulary: int = VOCABULARY, layers: int = 12) -> Contest:
    """Hugging Face's GPT-2: 12 layers, d = 256, 4 x 128, dropout 0.1."""
    model = gpt2_of(
        n_layer=layers, n_embd=256, n_head=8, n_positions=128, vocab_size=vocabulary,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    name = f"GPT-2, {layers} layers, d=256, 4 x 128"
    if vocabulary != VOCABULARY:
        name += f", vocabulary {vocabulary}"
    return _language(name, model, model.transformer.h, vocabulary)


def bert() -> Contest:
    """Hugging Face's BERT: 12 layers, d = 256, 4 x 128, dropout 0.1."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=12, num_attention_heads=8,
        intermediate_size=1024, max_position_embeddings=128,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    return _language("BERT, 12 layers, d=256, 4 x 128", model, model.bert.encoder.layer)


def small_llama() -> Contest:
    """A Llama-shaped decoder: 12 layers, d = 256, 4 x 128."""
    model: Any = llama_of(256, 688, 12, 8, 8, VOCABULARY, 128)
    return _language("Llama, 12 layers, d=256, 4 x 128", model, model.model.layers)


CONTESTS: dict[str, Callable[[], Contest]] = {
    "resnet50": resnet50,
    "vit": vit,
    "unet": unet,
    "gpt2": gpt2,
    "bert": bert,
    "llama": small_llama,
    **{f"gpt2-{words}": partial(gpt2, words) for words in (1000, 50257)},
}


def build(name: str) -> Contest:
    """The contest of that name, weights and data always the same."""
    return made(CONTESTS[name])


def made(make: Callable[[], Contest]) -> Contest:
    """A contest in train mode, weights and data always the same."""
    torch.manual_seed(0)
    contest = make()
    contest.model.train()
    return contest
