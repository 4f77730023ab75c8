"""Hugging Face's Trainer with MemoptCallback: fifty steps, validation between, killed and resumed.

Everything is compared with the same training without memopt, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import memopt
from memopt.integrations.hugging_face import MemoptCallback
from tests.users.metering import StepMeter

STEPS = 50
SIZE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}


def bert() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.BertConfig(vocab_size=100, intermediate_size=64, **SIZE)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=100, n_layer=2, n_embd=32, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def lora() -> nn.Module:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, intermediate_size=64, bos_token_id=1, eos_token_id=1, **SIZE
    )
    adapter = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    made: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)
    return made


@dataclass(frozen=True)
class Task:
    """A model, and whether it is a language model on padded texts of two lengths."""

    model: Callable[[], nn.Module]
    language: bool

    def examples(self, count: int) -> list[dict[str, Any]]:
        draw = torch.Generator().manual_seed(0)
        lengths = (12, 18) if self.language else (16,)
        made = []
        for index in range(count):
            ids = torch.randint(2, 100, (lengths[index % len(lengths)],), generator=draw)
            made.append({"input_ids": ids.tolist(), "labels": index % 2})
        return made

    def batch(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(one["input_ids"]) for one in examples)
        rows = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in examples]
        ids = torch.tensor(rows)
        labels = torch.tensor([one["labels"] for one in examples])
        if self.language:
            labels = ids.masked_fill(ids == 0, -100)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


TASKS = {"bert": Task(bert, False), "gpt2": Task(gpt2, True), "lora": Task(lora, True)}


@dataclass
class Watch(transformers.TrainerCallback):
    """What a training was: losses, and each planned step's peak less its budget."""

    losses: list[tuple[str, float]] = field(default_factory=list)
    over_bytes: list[int] = field(default_factory=list)
    stop_at: int | None = None
    meter: StepMeter | None = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        self.losses += [(key, logs[key]) for key in ("loss", "eval_loss") if key in logs]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter is not None:
            self.meter.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter is not None:
            self.over_bytes.append(self.meter.end(kwargs["model"].memopt.plans[-1]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.stop_at:
            raise KeyboardInterrupt


def trained(
    task: Task, folder: Path, callback: MemoptCallback | None, watch: Watch, resume: bool = False
) -> nn.Module:
    model = task.model()
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="steps",
        save_steps=20,
        train_sampling_strategy="group_by_length" if task.language else "random",
        seed=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=task.examples(64),
        eval_dataset=task.examples(8),
        data_collator=task.batch,
        callbacks=[watch, *([callback] if callback is not None else [])],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize(
    "name",
    [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.slow) for name in TASKS],
)
def test_fifty_steps_as_without_memopt_and_resumed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    task, callback = TASKS[name], MemoptCallback("min")
    plain, planned = Watch(), Watch(meter=StepMeter(monkeypatch))
    expected = trained(task, tmp_path / "plain", None, plain)
    model = trained(task, tmp_path / "planned", callback, planned)
    assert planned.losses == plain.losses
    assert len([key for key, _ in plain.losses if key == "loss"]) == STEPS
    assert callback.calls.planned == STEPS
    assert len(planned.over_bytes) == STEPS
    assert max(planned.over_bytes) <= 0
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert not hasattr(model, "memopt")

    # A resumed training need not go on as one that was never stopped: the Trainer groups texts of
    # a length anew. It goes on as one that was stopped without memopt.
    ends = {}
    for kind, used in (("without", None), ("with", callback)):
        folder, watch = tmp_path / kind, Watch()
        with pytest.raises(KeyboardInterrupt):
            trained(task, folder, used, Watch(stop_at=33))
        ends[kind] = trained(task, folder, used, watch, resume=True).state_dict(), watch.losses
    assert callback.calls.planned == STEPS - 20
    assert ends["with"][1] == ends["without"][1]
    for key, value in ends["without"][0].items():
        assert torch.equal(ends["with"][0][key], value), key


def test_a_model_trains_again_after_an_interrupted_training() -> None:
    """The Trainer tells no callback that it was interrupted: the model is still wrapped."""
    model, settings = bert(), transformers.TrainingArguments(use_cpu=True)
    for callback in (MemoptCallback("min"), MemoptCallback("min")):
        callback.on_train_begin(settings, None, None, model=model)
        assert callback.calls is model.memopt.calls
    callback.on_train_end(settings, None, None, model=model)
    assert "memopt" not in model.__dict__
    memopt.wrap(model, "min")
    with pytest.raises(ValueError, match="taken already"):
        callback.on_train_begin(settings, None, None, model=model)


def test_torch_compile_is_said_to_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, settings = bert(), transformers.TrainingArguments(use_cpu=True, torch_compile=True)
    callback = MemoptCallback("min")
    callback.on_train_begin(settings, None, None, model=model)
    callback.on_train_end(settings, None, None, model=model)
    assert "torch_compile compiles nothing" in caplog.text


def test_an_optimizer_whose_state_is_not_known_before_its_step_is_met(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model = bert(), bert()
    ids = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
    settings, callback = (
        transformers.TrainingArguments(use_cpu=True),
        MemoptCallback("min", improve=False),
    )
    for one in (plain, model):
        optimizer = transformers.Adafactor(one.parameters())
        if one is model:
            callback.on_train_begin(settings, None, None, model=model, optimizer=optimizer)
        torch.manual_seed(0)
        for _ in range(3):
            one.train()(**ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "charged from the second step on" in caplog.text
    assert callback.calls.planned == 3
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    callback.on_train_end(settings, None, None, model=model)
