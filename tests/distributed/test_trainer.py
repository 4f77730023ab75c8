"""Hugging Face's Trainer on two processes: DistributedDataParallel around a planned model, and a
model that FSDP2 shards by blocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import cases, processes

STEPS, BATCH, MICRO_BATCHES, TOKENS = 5, 2, 2, 16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def examples(ranks: int) -> list[dict[str, Tensor]]:
    """Texts for all steps of all ranks."""
    torch.manual_seed(3)
    rows = torch.randint(0, cases.VOCABULARY, (STEPS * BATCH * MICRO_BATCHES * ranks, TOKENS))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(
    rank: int, ranks: int, folder: str, callback: Any, **options: Any
) -> tuple[list[float], list[Tensor]]:
    """Train; the logged losses and norms, and the parameters."""
    import transformers

    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    model = cases.gpt2()
    settings = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(
        model,
        settings,
        train_dataset=examples(ranks),
        callbacks=[] if callback is None else [callback],
    )
    if settings.fsdp:
        cases.fsdp2_on_cpu("GPT2Block")
        trainer.is_fsdp_enabled = True
    trainer.train()
    assert settings.world_size == ranks
    log = [one for one in trainer.state.log_history if "loss" in one]
    found = [value for one in log for value in (one["loss"], one["grad_norm"])]
    return found, cases.own(model)


def by_fsdp(rank: int, ranks: int, folder: str) -> tuple[bool, int, int, int]:
    """Train under FSDP2 without and with the callback: whether bits are the same; calls by kind."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

    from accelerate.state import AcceleratorState  # isort: skip

    from memopt.integrations.hugging_face import MemoptCallback  # isort: skip

    callback, found = MemoptCallback("min", strategy="rotor"), []
    for one in (None, callback):
        AcceleratorState._reset_state(reset_partial_state=True)
        found.append(trained(rank, ranks, folder, one, fsdp=True))
    (expected, own), (logged, parameters) = found
    same = logged == expected and len(logged) == 2 * STEPS and cases.same(parameters, own)
    calls = callback.calls
    return same, calls.planned, calls.original, calls.replanned


@pytest.mark.slow
def test_trainer_shards_by_blocks(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    blocks = 4
    for one in processes.results(processes.run(by_fsdp, 2, work, str(tmp_path / "out"))):
        # What is outside of the blocks is a part, too.
        assert one == (True, STEPS * MICRO_BATCHES * (blocks + 1), 0, 0)


def both(rank: int, ranks: int, folder: str) -> list[dict[str, Any]]:
    """Train without and with the callback, in its defaults and within the smallest budget."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

    from memopt.integrations.hugging_face import MemoptCallback  # isort: skip

    expected, own = trained(rank, ranks, folder, None)
    found = []
    for callback in (MemoptCallback(), MemoptCallback("min")):
        logged, parameters = trained(rank, ranks, folder, callback)
        found.append(
            {
                "same": logged == expected and cases.same(parameters, own),
                "steps": len(logged) // 2,
                "planned": callback.calls.planned,
                "others": callback.calls.original + callback.calls.replanned,
                "over": [one.peak_bytes - (one.budget or one.peak_bytes) for one in callback.plans],
            }
        )
    return found


@pytest.mark.slow
def test_trainer_on_two_processes(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for one in processes.results(processes.run(both, 2, work, str(tmp_path / "out"))):
        for way in one:
            assert way["same"]
            assert way["steps"] == STEPS
            assert (way["planned"], way["others"]) == (STEPS * MICRO_BATCHES, 0)
            assert way["over"] == [0]
