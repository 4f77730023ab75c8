"""The models of the peers' table, small enough for a CPU, with their repeated blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.losses import WithLoss
from tests.zoo import Inputs, call, torchvision_shim
from tests.zoo.handwritten import UNet

VOCABULARY = 8192


@dataclass(frozen=True)
class Contest:
    """A model, its inputs and loss, and where checkpointing would cut it.

    Attributes:
        name: as in the table.
        model: the bare model.
        module: the model with its loss: the only output is the scalar.
        inputs: of both.
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
        """One forward, loss and backward, random state set before."""
        torch.manual_seed(0)
        # A compiled module has no truth value.
        call(self.module if module is None else module, self.inputs).backward()


def _contest(
    name: str,
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    inputs: Inputs,
    blocks: list[nn.Module],
    sequence: nn.Sequential | None = None,
) -> Contest:
    return Contest(name, model, WithLoss(model, loss), inputs, tuple(blocks), sequence)


def _images(batch: int, size: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, size, size),)


def resnet50() -> Contest:
    """torchvision's ResNet-50 as a sequence, 8 images of 128 x 128."""
    torchvision_shim.declare_missing_operators()
    from torchvision import models

    whole = models.resnet50()
    # One module: a segment must not start at the stem's in-place ReLU, which overwrites its input.
    stem = nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool)
    blocks = [*whole.layer1, *whole.layer2, *whole.layer3, *whole.layer4]
    model = nn.Sequential(stem, *blocks, whole.avgpool, nn.Flatten(1), whole.fc)
    classes = torch.arange(8)
    return _contest(
        "ResNet-50, 8 x 128",
        model,
        lambda logits: functional.cross_entropy(logits, classes),
        _images(8, 128),
        blocks,
        model,
    )


def vit() -> Contest:
    """A ViT-B/16 reduced to d = 384: 12 layers, 8 images of 96 x 96."""
    torchvision_shim.declare_missing_operators()
    from torchvision.models import VisionTransformer

    model = VisionTransformer(96, 16, 12, 6, 384, 1536, dropout=0.1)
    classes = torch.arange(8)
    return _contest(
        "ViT/16, d=384, 8 x 96",
        model,
        lambda logits: functional.cross_entropy(logits, classes),
        _images(8, 96),
        list(model.encoder.layers),
    )


def unet() -> Contest:
    """The zoo's U-Net, width 16, 4 images of 128 x 128: long skip connections."""
    model = UNet(16)
    target = torch.randint(0, 2, (4, 128, 128))
    parts = [m for m in model.modules() if isinstance(m, nn.Sequential)]
    return _contest(
        "U-Net, width 16, 4 x 128",
        model,
        lambda output: functional.cross_entropy(output, target),
        _images(4, 128),
        parts,
    )


def _language(name: str, model: nn.Module, layers: Any, vocabulary: int = VOCABULARY) -> Contest:
    ids = torch.randint(0, vocabulary, (4, 128))

    def loss(output: Any) -> Tensor:
        logits = output.logits[:, :-1].reshape(-1, vocabulary)
        return functional.cross_entropy(logits, ids[:, 1:].reshape(-1))

    return _contest(name, model, loss, {"input_ids": ids}, list(layers))


def gpt2(vocabulary: int = VOCABULARY, layers: int = 12) -> Contest:
    """Hugging Face's GPT-2: 12 layers, d = 256, 4 x 128, dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=256,
        n_head=8,
        n_positions=128,
        vocab_size=vocabulary,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    name = f"GPT-2, {layers} layers, d=256, 4 x 128"
    if vocabulary != VOCABULARY:
        name += f", vocabulary {vocabulary}"
    return _language(name, model, model.transformer.h, vocabulary)


def bert() -> Contest:
    """Hugging Face's BERT: 12 layers, d = 256, 4 x 128, dropout 0.1."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=8,
        intermediate_size=1024,
        max_position_embeddings=128,
    )
    model = BertForMaskedLM(config)
    return _language("BERT, 12 layers, d=256, 4 x 128", model, model.bert.encoder.layer)


def llama() -> Contest:
    """A Llama-shaped decoder: 12 layers, d = 256, 4 x 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=688,
        max_position_embeddings=128,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    return _language("Llama, 12 layers, d=256, 4 x 128", model, model.model.layers)


CONTESTS: dict[str, Callable[[], Contest]] = {
    "resnet50": resnet50,
    "vit": vit,
    "unet": unet,
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
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
