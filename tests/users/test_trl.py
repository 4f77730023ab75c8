"""TRL's trainers at their defaults, with memopt's callback: every loss and weight bit for bit,
every step planned, every peak within the budget."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from memopt.errors import CaptureError
from memopt.integrations.hugging_face import MemoptCallback
from memopt.step.backend import backend_of
from tests.users.metering import StepMeter

trl = pytest.importorskip("trl", reason="`make test-trl` installs it")
datasets: Any = pytest.importorskip("datasets")

from examples.train_trl import llama, main, texts, tokenizer  # noqa: E402

STEPS = 20
BARE = {"kto": 3}
"""Steps whose peaks are not taken, of most cases one: planning in its backward cannot be told from
the step. For KTO the callback meters the loss of the second one itself, and plans for it when the
third begins, which it could not do while that one is metered."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def completions(**columns: list[str]) -> Any:
    return datasets.Dataset.from_dict({"prompt": [f"{one} " for one in texts(8)], **columns})


def sft(common: dict[str, Any], prompts: bool = False, **settings: Any) -> Any:
    data = datasets.Dataset.from_dict({"text": texts(24)})
    return trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**common.pop("settings"), **settings),
        train_dataset=completions(completion=texts(16, 1)) if prompts else data,
        **common,
    )


def dpo(common: dict[str, Any], **settings: Any) -> Any:
    return trl.DPOTrainer(
        model=llama(),
        ref_model=None if "peft_config" in common else llama(),
        args=trl.DPOConfig(**common.pop("settings"), **settings),
        train_dataset=completions(chosen=texts(16, 1), rejected=texts(16, 2)),
        **common,
    )


def adapted_dpo(common: dict[str, Any]) -> Any:
    return dpo({**common, "peft_config": lora()})


def reward(common: dict[str, Any]) -> Any:
    data = datasets.Dataset.from_dict({"chosen": texts(24, 1), "rejected": texts(24, 2)})
    return trl.RewardTrainer(
        model=llama(transformers.LlamaForSequenceClassification),
        args=trl.RewardConfig(**common.pop("settings")),
        train_dataset=data,
        **common,
    )


def kto(common: dict[str, Any]) -> Any:
    return trl.KTOTrainer(
        model=llama(),
        ref_model=llama(),
        args=trl.KTOConfig(**common.pop("settings")),
        train_dataset=completions(completion=texts(16, 1), label=[True, False] * 20),
        **common,
    )


def distillation(common: dict[str, Any]) -> Any:
    return trl.DistillationTrainer(
        model=llama(),
        teacher_model=llama(),
        args=trl.DistillationConfig(**common.pop("settings"), max_completion_length=8),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(16)}),
        **common,
    )


def rewarded(common: dict[str, Any], kind: str) -> Any:
    def distinct(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(one))) for one in completions]

    settings = {"num_generations": 4, "max_completion_length": 8}
    model, folder = llama(), Path(common["settings"]["output_dir"]) / "model"
    model.save_pretrained(folder)
    model.config._name_or_path = str(folder)  # where RLOO finds its reference
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=distinct,
        args=getattr(trl, f"{kind}Config")(**common.pop("settings"), **settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(16)}),
        **common,
    )


class Watch(transformers.TrainerCallback):
    """Losses and gradient norms of a training, and each step's peak less its budget, but for the
    first `bare` steps."""

    def __init__(self, meter: StepMeter | None, callback: MemoptCallback | None, bare: int) -> None:
        self.meter, self.callback, self.bare = meter, callback, bare
        self.logged: list[tuple[float, float]] = []
        self.over_bytes: list[int] = []
        self._running = False

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.logged.append((logs["loss"], logs["grad_norm"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter is not None and state.global_step >= self.bare:
            self.meter.begin()
            self._running = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter is not None and self.callback is not None and self._running:
            self.over_bytes.append(self.meter.end(self.callback.plans[-1]))


def trained(
    make: Callable[..., Any],
    folder: Path,
    steps: int,
    callback: MemoptCallback | None = None,
    meter: StepMeter | None = None,
    bare: int = 1,
    **how: Any,
) -> tuple[Watch, Any]:
    transformers.set_seed(0)
    watch = Watch(meter, callback, bare)
    settings = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "logging_steps": 1,
        "use_cpu": True,
        "seed": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    callbacks = [watch, *([] if callback is None else [callback])]
    trainer = make(
        {"settings": settings, "processing_class": tokenizer(), "callbacks": callbacks}, **how
    )
    trainer.train()
    return watch, trainer.model


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sft": (sft, {}),
    "sft-packed": (sft, {"packing": True, "max_length": 32}),
    "sft-completions": (sft, {"prompts": True}),
    "dpo": (dpo, {}),
    "dpo-adapters": (adapted_dpo, {}),
    "reward": (reward, {}),
    "grpo": (rewarded, {"kind": "GRPO"}),
    "rloo": (rewarded, {"kind": "RLOO"}),
    "kto": (kto, {}),
}
FROM_CALL = ("grpo", "rloo", "kto")
"""Those that use the model before its training call, for completions or divergences."""


def check(name: str, folder: Path, steps: int, meter: StepMeter | None) -> None:
    make, how = CASES[name]
    plain, reference = trained(make, folder, steps, **how)
    callback = MemoptCallback("min", improve=False)
    bare = BARE.get(name, 1)
    watch, model = trained(make, folder, steps, callback, meter, bare, **how)
    assert watch.logged == plain.logged
    assert len(watch.logged) == steps
    pairs = itertools.zip_longest(model.parameters(), reference.parameters())
    assert all(torch.equal(one, other) for one, other in pairs)
    assert callback.calls.planned == steps
    # The small tensors of each step are metered, and charged besides.
    counted_twice = backend_of(torch.device("cpu")).step_scalars_bytes if name == "kto" else 0
    assert max(watch.over_bytes, default=0) <= counted_twice
    assert len(watch.over_bytes) == (0 if meter is None else steps - bare)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_trainers_at_their_defaults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, tmp_path, STEPS, StepMeter(monkeypatch, from_call=name in FROM_CALL))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Its sub-modules are planned instead")
def test_distillation_in_parts(tmp_path: Path) -> None:
    """It calls the model with models, for a loss inside of the call."""
    plain, reference = trained(distillation, tmp_path, STEPS)
    with pytest.raises(CaptureError, match='parts="auto"'):
        trained(distillation, tmp_path, STEPS, MemoptCallback("min", improve=False))
    callback = MemoptCallback("min", improve=False, parts="auto")
    watch, model = trained(distillation, tmp_path, STEPS, callback)
    assert watch.logged == plain.logged
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert callback.calls.planned == STEPS


def test_supervised_fine_tuning_with_its_default_loss(tmp_path: Path) -> None:
    check("sft", tmp_path, 3, None)


def test_the_script_that_the_page_names() -> None:
    assert main(steps=2).calls.planned == 2
