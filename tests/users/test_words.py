"""What is captured, or refused with a remedy of its own, of what people train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from memopt.capture import trace
from memopt.capture.capture import capture
from memopt.capture.training_call import training_call
from memopt.errors import CaptureError
from memopt.step.inputs import to_call
from tests.distributed.gloo import in_one_thread

IDS = torch.arange(2, 34).view(2, 16)
TEXT = {"input_ids": IDS, "labels": IDS}
SIZE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}


def plan(model: nn.Module, inputs: Any, **how: Any) -> memopt.Plan:
    return memopt.plan(model, inputs, budget="min", progress=False, **how)


def same_step(model: nn.Module, inputs: torch.Tensor) -> None:
    """A planned step gives the model's own output and gradients."""
    planned = plan(model, inputs).apply(model)
    found, expected = planned(inputs), model(inputs)
    assert torch.equal(found, expected)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(found.sum(), parameters)
    for one, other in zip(ours, torch.autograd.grad(expected.sum(), parameters), strict=True):
        assert torch.equal(one, other)


def t5(**settings: Any) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=100, decoder_start_token_id=0, **sizes, **settings)
    model: nn.Module = transformers.T5ForConditionalGeneration(config).train()
    return model


def gpt2(**settings: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=100, n_layer=2, n_embd=32, n_head=2, bos_token_id=1, eos_token_id=1, **settings
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return model


@pytest.mark.parametrize("make", [gpt2, t5])
def test_hugging_faces_models_are_traced_once(make: Callable[[], nn.Module]) -> None:
    """They ask whether they are compiled where it changes nothing that they compute."""
    with mock.patch.object(trace, "dynamo_capture", wraps=trace.dynamo_capture) as traced:
        capture(make(), to_call({**TEXT, "use_cache": False}))
    assert traced.call_count == 1


class Transformed(nn.Module):
    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(lambda row: self.linear(row).sin(), x)


WAYS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacobian": lambda f, x: torch.vmap(torch.func.jacrev(f))(x),
}


@pytest.mark.parametrize("name", WAYS)
def test_function_transforms_are_captured(name: str) -> None:
    torch.manual_seed(0)
    same_step(Transformed(WAYS[name]), torch.randn(8, 16))


def test_a_transform_of_a_refused_model_is_left() -> None:
    """`torch.prod` under a transform is refused amid its trace; the model then runs as before."""
    model = Transformed(lambda f, x: torch.func.grad(lambda y: f(y).prod())(x))
    x = torch.randn(8, 16)
    with pytest.raises(CaptureError):
        plan(model, x)
    model(x).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        model.linear(x).sum()


def test_gradient_checkpointing_is_to_be_switched_off() -> None:
    model = t5()
    model.gradient_checkpointing_enable()
    with pytest.raises(CaptureError, match=r"gradient_checkpointing_disable.*memopt replaces it"):
        plan(model, TEXT)
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    plan(model, TEXT).apply(model)(**TEXT)


def test_an_adapted_model_of_checkpointed_layers_is_planned() -> None:
    config = transformers.LlamaConfig(
        vocab_size=100, intermediate_size=64, bos_token_id=1, eos_token_id=1, **SIZE
    )
    inner = transformers.LlamaForCausalLM(config)
    inner.gradient_checkpointing_enable()
    model = peft.get_peft_model(inner, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    trained = [one for one in model.parameters() if one.requires_grad]
    losses = model(**TEXT).loss, plan(model, TEXT).apply(model)(**TEXT).loss
    assert torch.equal(*losses)
    expected, found = (torch.autograd.grad(one, trained) for one in losses)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    "name", ["output_hidden_states", pytest.param("output_attentions", marks=pytest.mark.slow)]
)
def test_recorded_outputs_are_as_in_eager(name: str) -> None:
    """Their hooks are set when the model is captured, as its first call would set them."""
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = gpt2(**{name: True}, attn_implementation="eager", **without)
    planned = plan(model, TEXT).apply(model)
    found, expected = planned(**TEXT), model(**TEXT)
    recorded = name.removeprefix("output_")
    assert len(found[recorded]) == len(expected[recorded]) > 0
    assert all(map(torch.equal, found[recorded], expected[recorded]))
    gradients = []
    for output in (found, expected):
        loss = output.loss + output[recorded][0].square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_a_whole_step_of_a_fresh_model_that_records_outputs_runs() -> None:
    """The hooks that a capture sets stay, the same ones, so that the step finds what it planned."""
    models = [gpt2(output_hidden_states=True), gpt2(output_hidden_states=True)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]

    def loss_of(output: Any) -> Any:
        return output.loss + output.hidden_states[0].square().mean()

    how: dict[str, Any] = {"optimizer": optimizers[0], "loss_fn": loss_of, "whole_step": True}
    made = plan(models[0], TEXT, strategy="rotor", **how)
    step = made.train_step(models[0], loss_of, optimizers[0])
    for seed in range(2):
        torch.manual_seed(seed)
        found = step(**TEXT)
        torch.manual_seed(seed)
        loss = loss_of(models[1](**TEXT, use_cache=False))
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(found, loss)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    installed = [[len(one._forward_hooks) for one in model.modules()] for model in models]
    assert installed[0] == installed[1]


def test_keys_and_values_are_left_out_with_a_notice() -> None:
    model = gpt2()
    assert model.config.use_cache
    made = plan(model, TEXT)
    assert any("use_cache=False" in note for note in made.notes)
    planned = made.apply(model)
    torch.manual_seed(0)
    output = planned(**TEXT)
    assert planned.calls.planned == 1
    assert output.past_key_values is None
    torch.manual_seed(0)
    assert torch.equal(output.loss, model(**TEXT, use_cache=False).loss)
    assert model.config.use_cache


@pytest.mark.parametrize(
    ("classes", "labels", "kind"),
    [
        pytest.param(
            3, torch.tensor([0, 1]), "single_label_classification", marks=pytest.mark.slow
        ),
        pytest.param(1, torch.tensor([0.5, 1.0]), "regression", marks=pytest.mark.slow),
        (3, torch.eye(3)[:2], "multi_label_classification"),
    ],
)
def test_a_classifier_gets_the_problem_type_of_its_labels(
    classes: int, labels: torch.Tensor, kind: str
) -> None:
    config = transformers.BertConfig(
        vocab_size=100, intermediate_size=64, num_labels=classes, **SIZE
    )
    model = transformers.BertForSequenceClassification(config).train()
    inputs = {"input_ids": IDS, "labels": labels}
    plan(model, inputs).apply(model)(**inputs)
    assert model.config.problem_type == kind


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    where = f"file://{tmp_path / 'store'}"
    in_one_thread()
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_data_parallel_goes_around_a_wrapped_model() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
    with pytest.raises(CaptureError, match=r"DistributedDataParallel\(memopt\.wrap\("):
        plan(DistributedDataParallel(model), inputs)
    around = DistributedDataParallel(memopt.wrap(model, "min", progress=False))
    around(inputs).sum().backward()
    assert model.calls.planned == 1
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("process_group")
def test_a_whole_step_does_not_run_in_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = plan(model, inputs, loss_fn=torch.sum, optimizer=optimizer, whole_step=True)
    around = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"DistributedDataParallel\(memopt\.wrap\("):
        made.train_step(around, torch.sum, optimizer)
    # The module inside, which does not know of it, where there are others to exchange with.
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="exchanges no gradients"):
        made.train_step(model, torch.sum, optimizer)


def test_a_loss_without_its_targets_is_the_call_s_fault() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(ValueError, match="called as loss_fn"):
        plan(model, torch.randn(8, 16), loss_fn=nn.MSELoss())


def test_eval_mode_is_noted() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)).eval()
    assert any("eval mode" in note for note in plan(model, torch.randn(8, 16)).notes)
    model.train()
    assert not any("eval mode" in note for note in plan(model, torch.randn(8, 16)).notes)


def test_a_share_is_read_as_on_the_command_line() -> None:
    model, inputs = nn.Linear(64, 64), torch.randn(8, 64)
    made = [memopt.plan(model, inputs, budget=b, progress=False) for b in (1.0, "1.0")]
    assert made[0].budget == made[1].budget


def test_statuses_of_a_data_frame_are_texts() -> None:
    model, inputs = nn.Linear(64, 64), torch.randn(8, 64)
    table = memopt.compare(model, inputs, budgets=["min"], strategies=["rotor"], progress=False)
    assert type(table.to_dataframe()["status"][0]) is str


def test_a_thousand_steps_of_alternating_shapes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from memopt.api import wrap as wrap_module

    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    solved = []
    make = wrap_module.make_plan
    monkeypatch.setattr(wrap_module, "make_plan", lambda *a: solved.append(1) or make(*a))
    torch.manual_seed(0)
    model = memopt.wrap(
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)), "min", progress=False
    )
    for step in range(1000):
        model(torch.randn((4, 8, 12)[step % 3], 32)).sum().backward()
        model.zero_grad()
    assert len(solved) == 3
    assert len(model.memopt.plans) == 3
    assert model.calls.planned == 1000


def test_keys_and_values_of_a_decoder_with_a_configuration_of_its_own() -> None:
    """As the Trainer calls it, which changes the model's own."""
    model = t5()
    model.config.use_cache = False
    planned = plan(model, TEXT).apply(model)
    assert planned(**TEXT).past_key_values is None
    assert planned.calls.planned == 1


class Outer(nn.Module):
    """Hands its **kwargs on to the decoder that keeps keys and values, as vision-language models
    do."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.config = transformers.BertConfig()
        self.inside = decoder

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.inside(input_ids, **kwargs)


def test_keys_and_values_of_a_decoder_two_models_inside() -> None:
    ids = {"input_ids": IDS}
    assert training_call(Outer(Outer(gpt2())), ids).kwargs["use_cache"] is False
    assert "use_cache" not in training_call(Outer(gpt2(use_cache=False)), ids).kwargs
