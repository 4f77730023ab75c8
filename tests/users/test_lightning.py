"""Lightning with MemoptCallback, compared with the same training without memopt, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memopt.integrations.lightning import MemoptCallback
from tests.users.metering import StepMeter

STEPS = 50


class Module(lightning.LightningModule):
    """A classifier whose `training_step` calls itself, or its network."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.whole = whole
        self.losses: list[float] = []
        blocks = [
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        ]
        self.network = nn.Sequential(*blocks, nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.network(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x) if self.whole else self.network(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.losses.append(nn.functional.cross_entropy(self(x), y).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Two(Module):
    """A module with two networks."""

    def __init__(self) -> None:
        super().__init__(False)
        self.other = nn.Linear(4, 4)

    forward = lightning.LightningModule.forward


class Around(nn.Module):
    """What a strategy puts around a LightningModule, as DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class PutAround(SingleDeviceStrategy):
    """Calls `training_step` through the forward of another module."""

    def setup(self, trainer: lightning.Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        self.model = Around(self.model)


class Meter(lightning.Callback):
    """Each training batch's peak less its budget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._meter = StepMeter(monkeypatch)
        self.over_bytes: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._meter.begin()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        asking = [m.memopt for m in pl_module.modules() if "memopt" in m.__dict__]
        # The outermost module that ran: the others are parts of its step.
        ran = next(one for one in asking if one.plans)
        self.over_bytes.append(self._meter.end(ran.plans[-1]))


class Kill(lightning.Callback):
    """Writes a checkpoint in the middle of an epoch, and ends the training in that of the next."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 14:
            trainer.save_checkpoint(self._checkpoint)
        if trainer.global_step == 23:
            raise RuntimeError("killed")


def batches() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(80, 16, generator=draw)
    y = torch.randint(0, 4, (80,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fitted(
    folder: Path,
    memopt: MemoptCallback | None,
    module: Module,
    steps: int = STEPS,
    resume: Path | None = None,
    others: Sequence[lightning.Callback] = (),
    **settings: Any,
) -> lightning.Trainer:
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=5,
        callbacks=[*others, *([memopt] if memopt is not None else [])],
        default_root_dir=folder,
        **{"accelerator": "cpu", **settings},
    )
    trainer.fit(module, batches(), batches(), ckpt_path=resume)
    return trainer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "network"])
@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({}, STEPS),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, 2 * STEPS),
        ({"precision": "bf16-mixed"}, STEPS),
    ],
    ids=["plain", "accumulated", "bf16"],
)
def test_fifty_steps_as_without_memopt(
    settings: dict[str, Any],
    calls: int,
    whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback, meter = MemoptCallback("min"), Meter(monkeypatch)
    plain, planned = Module(whole), Module(whole)
    fitted(tmp_path, None, plain, **settings)
    fitted(tmp_path, callback, planned, others=[meter], **settings)
    assert planned.losses == plain.losses
    assert callback.calls.planned == calls
    assert len(meter.over_bytes) == calls
    assert max(meter.over_bytes) <= 0
    for key, value in plain.state_dict().items():
        assert torch.equal(planned.state_dict()[key], value), key
    assert "memopt" not in planned.__dict__
    assert "memopt" not in planned.network.__dict__


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_killed_training_resumes(tmp_path: Path) -> None:
    """In the middle of an epoch, as one that was killed and resumed without memopt."""
    ends = []
    checkpoint = tmp_path / "half.ckpt"
    for callback in (None, MemoptCallback("min")):
        killed, module = Module(True), Module(True)
        with pytest.raises(RuntimeError, match="killed"):
            fitted(tmp_path, callback, killed, others=[Kill(checkpoint)])
        assert "memopt" not in killed.__dict__
        trainer = fitted(tmp_path, callback, module, resume=checkpoint)
        assert trainer.global_step == STEPS
        if callback is not None:
            assert callback.calls.planned == STEPS - 14
        ends.append((killed.losses, module.losses, module.state_dict()))
        checkpoint.unlink()
    assert ends[0][:2] == ends[1][:2]
    assert all(torch.equal(ends[0][2][key], value) for key, value in ends[1][2].items())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_which_module_is_asked_where_it_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which of network, other"):
        fitted(tmp_path, MemoptCallback("min"), Two(), steps=2)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sub_modules_that_are_named_share_the_budget(tmp_path: Path) -> None:
    """As the refusal advises."""
    callback = MemoptCallback("1MiB", "rotor", parts=["network", "other"], improve=False)
    plain, planned = Two(), Two()
    fitted(tmp_path, None, plain, steps=3, limit_val_batches=0)
    fitted(tmp_path, callback, planned, steps=3, limit_val_batches=0)
    assert callback.calls.planned == 3
    assert planned.losses == plain.losses


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_are_averaged(tmp_path: Path) -> None:
    """The epoch that then updates batch norm's statistics cannot be planned."""
    ends = []
    for callback in (None, MemoptCallback("min")):
        averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)
        module = Module(True)
        fitted(tmp_path, callback, module, -1, others=[averaging], max_epochs=2)
        assert callback is None or callback.calls.planned == 20
        ends.append((module.losses, list(module.state_dict().values())))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_called_through_what_is_around_it(tmp_path: Path) -> None:
    """Its call is then `training_step`, which logs and reads values; what that calls is planned."""
    ends = []
    for callback in (None, MemoptCallback("2MiB", "rotor")):
        module = Module(True)
        around = PutAround("cpu", accelerator=CPUAccelerator())
        fitted(tmp_path, callback, module, 8, strategy=around, accelerator="auto")
        assert callback is None or callback.calls.planned == 8
        ends.append((module.losses, list(module.state_dict().values())))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))
