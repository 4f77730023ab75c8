"""`torch.compile(model, backend="memopt")` on the model families, and for twenty steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.steps import peak_of
from memopt.integrations.torch_compile import compiled_steps, memopt_backend
from memopt.models.charges import Charges
from memopt.programs.charged import needed_bytes
from memopt.torch_private import pytree
from tests.kernels.compiled.test_families import NAMES, gradients
from tests.zoo import FAMILIES, Family, call

STEPS = 20


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def bytes_of(model: nn.Module, inputs: Any) -> int:
    """Parameters, buffers and inputs, each storage once."""
    given = inputs.values() if isinstance(inputs, dict) else inputs
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [one for one in given if isinstance(one, Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES, ids=NAMES)
def test_every_family_has_eagers_gradients_within_its_budget(family: Family) -> None:
    model, inputs = family.build("tiny"), family.inputs("tiny")
    expected = gradients(family, model, model, inputs)
    run: Any = torch.compile(model, backend=memopt_backend, options={"budget": "min"})
    found = gradients(family, model, run, inputs)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name

    def step() -> None:
        family.loss(call(run, inputs)).backward()

    peak = bytes_of(model, inputs) + peak_of(model, step, torch.device("cpu"))
    made = compiled_steps()[-1]
    (only,) = made.graphs or made._now
    # VGG's parameters leave a tiny image nothing to save.
    assert only.plan.peak_bytes < only.first.peak_bytes or family.name == "vgg16"
    # The loss is not the model's, and comes on top of what is there when the forward is over.
    beside = Charges(boundary_bytes=loss_bytes(family, model, inputs))
    assert peak <= needed_bytes(only.plan.graph, only.plan.program, beside)


def loss_bytes(family: Family, model: nn.Module, inputs: Any) -> int:
    """The memory of a family's loss and its backward, beside the outputs and their gradients."""

    def apart(leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach().requires_grad_() if is_real else leaf

    with torch.no_grad():
        outputs = pytree.tree_map(apart, call(model, inputs))
    peak = peak_of(nn.Module(), lambda: family.loss(outputs).backward(), torch.device("cpu"))
    leaves = [one for one in pytree.tree_leaves(outputs) if isinstance(one, Tensor)]
    return peak - sum(one.grad.nbytes for one in leaves if one.grad is not None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_steps_of_gpt2_are_aot_eagers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=64, n_head=4, n_positions=32, vocab_size=256, use_cache=False
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 256, (STEPS, 4, 32))

    def losses(one: nn.Module, run: Any) -> list[float]:
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        found = []
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = run(input_ids=ids[step], labels=ids[step]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    twin = copy.deepcopy(model)
    expected = losses(twin, torch.compile(twin, backend="aot_eager"))
    torch._dynamo.reset()
    options = {"budget": 0.9, "strategy": "rotor"}
    run = torch.compile(model, backend=memopt_backend, options=options)
    assert losses(model, run) == expected
    assert len(set(expected)) == STEPS
