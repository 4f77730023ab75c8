"""Models, and training loops of them, that tests run on several ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

VOCABULARY = 131


def mlp() -> nn.Sequential:
    """Three blocks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 130), nn.GELU(), nn.Linear(130, 16)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def gpt2(tied: bool = False) -> nn.Module:
    """A small GPT-2, without dropout."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

    from transformers import GPT2Config, GPT2LMHeadModel  # isort: skip

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=64,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
    )
    return GPT2LMHeadModel(config)


def resnet50() -> nn.Module:
    """A narrow ResNet-50."""
    from tests.zoo import get

    return get("resnet50").build("tiny")


def batch(model: nn.Module) -> dict[str, Any]:
    """A call of a model, drawn from the process's own generator."""
    if hasattr(model, "config"):
        ids = torch.randint(0, VOCABULARY, (4, 32))
        return {"input_ids": ids, "labels": ids}
    if isinstance(model, nn.Sequential):
        return {"input": torch.randn(64, 16)}
    return {"x": torch.randn(4, 3, 32, 32)}


def loss_of(output: Any) -> Tensor:
    """The model's own loss, or the mean square of its output."""
    loss: Tensor = output.loss if hasattr(output, "loss") else output.square().mean()
    return loss


def train(
    model: nn.Module, inner: nn.Module, rank: int, steps: int, accumulate: Any = None
) -> list[float]:
    """Train with AdamW and clipping; losses and norms.

    Args:
        model: what is called.
        inner: the model itself, for its inputs.
        rank: seeds the data.
        steps: how many.
        accumulate: a context for a micro-batch before each step, if there is to be one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(100 + rank)
    found = []
    for _ in range(steps):
        if accumulate is not None:
            with accumulate():
                loss_of(model(**batch(inner))).backward()
        loss = loss_of(model(**batch(inner)))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), whole(norm).item()]
    return found


def whole(value: Tensor) -> Tensor:
    """A tensor, gathered if ranks hold parts of it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def own(model: nn.Module) -> list[Tensor]:
    """This rank's parts of a model's parameters and buffers."""
    return [*map(local, (*model.parameters(), *model.buffers()))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def fsdp2_on_cpu(block: str) -> None:
    """Have accelerate, in its present state, shard models by blocks of this class with FSDP2, which
    it takes on accelerators alone."""
    import accelerate
    from accelerate.state import AcceleratorState

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block],
    )
    kind = accelerate.utils.DistributedType.FSDP
    AcceleratorState._shared_state.update(distributed_type=kind, fsdp_plugin=plugin)


def launched(ranks: int) -> None:
    """Tell launchers, by torchrun's variables, of the group that is there."""
    told = dict.fromkeys(("RANK", "LOCAL_RANK"), torch.distributed.get_rank())
    told |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ranks) | {"MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")


def by_trainer(
    model: nn.Module, texts: Tensor, folder: str, callbacks: list[Any], block: str, **options: Any
) -> tuple[list[float], list[Tensor]]:
    """Train by Hugging Face's Trainer; return the logged losses and norms, and parameters.

    Args:
        model: takes `input_ids` and `labels`.
        texts: of all steps of all ranks.
        folder: of the trainer's own files.
        callbacks: of the trainer.
        block: the class by which FSDP2 shards, if `fsdp=True` is among the options.
        options: of `TrainingArguments`: steps, batches.
    """
    import transformers

    settings = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    rows: Any = [{"input_ids": row, "labels": row} for row in texts]
    trained: Any = model
    trainer = transformers.Trainer(trained, settings, train_dataset=rows, callbacks=callbacks)
    if settings.fsdp:
        fsdp2_on_cpu(block)
        trainer.is_fsdp_enabled = True
    trainer.train()
    assert settings.world_size == torch.distributed.get_world_size()
    log = [one for one in trainer.state.log_history if "loss" in one]
    found = [value for one in log for value in (one["loss"], one["grad_norm"])]
    return found, own(model)
