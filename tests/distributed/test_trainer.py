"""Hugging Face's Trainer on two processes: DistributedDataParallel around a planned model, and a
model that FSDP2 shards by blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import cases, processes

STEPS, BATCH, MICRO_BATCHES, TOKENS = 5, 2, 2, 16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def trained(ranks: int, folder: str, callback: Any, **options: Any) -> Any:
    """Train; the logged losses and norms, and the parameters."""
    cases.launched(ranks)
    torch.manual_seed(3)
    rows = STEPS * BATCH * MICRO_BATCHES * ranks
    texts = torch.randint(0, cases.VOCABULARY, (rows, TOKENS))
    options |= {"max_steps": STEPS, "per_device_train_batch_size": BATCH}
    options |= {"gradient_accumulation_steps": MICRO_BATCHES}
    callbacks = [] if callback is None else [callback]
    return cases.by_trainer(cases.gpt2(), texts, folder, callbacks, "GPT2Block", **options)


def by_fsdp(rank: int, ranks: int, folder: str) -> tuple[bool, int, int, int]:
    """Train under FSDP2 without and with the callback: whether bits are the same; calls by kind."""
    from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

    from accelerate.state import AcceleratorState  # isort: skip

    from memopt.integrations.hugging_face import MemoptCallback  # isort: skip

    callback, found = MemoptCallback("min", strategy="rotor"), []
    for one in (None, callback):
        AcceleratorState._reset_state(reset_partial_state=True)
        found.append(trained(ranks, folder, one, fsdp=True))
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

    expected, own = trained(ranks, folder, None)
    found = []
    for callback in (MemoptCallback(), MemoptCallback("min")):
        logged, parameters = trained(ranks, folder, callback)
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
