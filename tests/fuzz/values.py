"""Random modules that look at values, trained within a budget: inputs are others in each step.

A module of the grammar, with statements of `tests.sweeps.grammar_values`, trains some steps beside
its twin, wrapped. Outputs, gradients, parameters, buffers, attributes, errors and random state have
to be the same bits; a step that runs by its plans alone has to keep the budget.
"""

from __future__ import annotations

import random
import warnings
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import memopt
from memopt.executor.check import unmetered_bytes
from memopt.executor.self_planning import SelfPlanning
from memopt.pricing.memory import metered
from tests.fuzz.loops import OPTIONS
from tests.sweeps.grammar import RandomModule, random_module
from tests.sweeps.grammar_values import VALUE_LINES
from tests.sweeps.modules import Found, compare, descended, returned, sentence

STEPS, KINDS = 12, 5
"""Steps of a case, and the different inputs that these draw from."""
MET = 4
"""Times that inputs are met before a step with them is metered."""
Inputs = tuple[Tensor, ...]
_CPU = torch.device("cpu")


def fuzz_values(seed: int) -> Found:
    """A seed's module as it is and wrapped; what differs, and what exceeds the budget."""
    found, dice = Found(seed), random.Random(f"values {seed}")
    made = random_module(seed, (3, 10), VALUE_LINES, 0.8)
    budget = dice.choice(("min", "min", None, 0.98))
    kinds = [_inputs(made, number) for number in range(KINDS)]
    order = [0, 0, *(dice.choice((0, *range(KINDS))) for _ in range(STEPS - 2))]
    model, twin = made.build(), made.build()
    label = f"within {budget}"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        memopt.wrap(model, budget, **OPTIONS)
        try:
            for step, kind in enumerate(order):
                wanted = _step(made, twin, kinds[kind], step)
                got = _step(made, model, kinds[kind], step)
                compare(wanted, got, f"step {step} {order}", label, found)
                if found.wrong:
                    break
            else:
                _budget(made, model, kinds, label, found)
        except memopt.MemoptError as error:
            found.refused[sentence(error)] += 1
            return found
        except Exception as error:  # noqa: BLE001
            found.wrong.append((label, sentence(error)))
    bits = [str(one.message) for one in told if "last bit" in str(one.message)]
    if bits and found.wrong:
        found.refused[f"warned: {bits[0][:80]}"] += 1
        found.wrong.clear()
    for text in {str(one.message)[:80] for one in told}:
        found.refused[f"warning: {text}"] += 1
    found.cases = found.ran = 1
    found.by_strategy["wrap"] += 1
    return found


def _inputs(made: RandomModule, number: int) -> Inputs:
    """Inputs like a module's own (those: 0), with values of their own."""
    draws = torch.Generator().manual_seed(number)
    found = made.inputs()
    with torch.no_grad():
        for value in found if number else ():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=draws) * (0.3 + number % 3))
            else:
                value.copy_(torch.randint(0, 5, value.shape, generator=draws))
    return found


def _step(made: RandomModule, model: nn.Module, kind: Inputs, step: int) -> dict[str, Any]:
    """A step of gradient descent; what it leaves behind, by name."""
    inputs = tuple(v.detach().clone().requires_grad_(v.requires_grad) for v in kind)
    torch.manual_seed(100 + step)
    record: dict[str, Any] = {}
    try:
        with made.context():
            output = model(*inputs)
            loss = made.loss(output)
        record |= returned(output, inputs, "")
        loss.backward()
    except memopt.MemoptError:
        raise
    except Exception as error:  # noqa: BLE001  # eager's own errors are compared
        record["error"] = f"{type(error).__name__}: {error}"
    record["random state"] = torch.get_rng_state()
    for i, value in enumerate(inputs):
        record[f"input {i}"], record[f"input {i} gradient"] = value.detach(), value.grad
    record |= descended(model, 0.002)
    record |= {f"state {name}": v.detach().clone() for name, v in model.state_dict().items()}
    record |= {k: (type(v), v) for k, v in vars(model).items() if isinstance(v, (int, float, list))}
    return record


def _budget(
    made: RandomModule, model: nn.Module, kinds: list[Inputs], label: str, found: Found
) -> None:
    """Meter a step of each kind of inputs, those met before."""
    ran: list[Any] = []
    inner = SelfPlanning._ran

    def watched(asking: SelfPlanning, plan: Any, *given: Any) -> Any:
        ran.append(plan)
        return inner(asking, plan, *given)

    with patch.object(SelfPlanning, "_ran", watched):
        for number, kind in enumerate(kinds):
            if any("error" in _step(made, model, kind, number) for _ in range(MET)):
                continue
            ran.clear()
            before = memopt.running(model).calls.planned
            state = {k: v.clone() for k, v in model.state_dict().items()}
            with metered(_CPU) as use:
                _bare_step(made, model, kind)
            model.load_state_dict(state)
            planned = memopt.running(model).calls.planned - before
            if planned != 1 or len(ran) != 1 or ran[0].plan.budget is None:
                continue
            plan = ran[0].plan
            peak = unmetered_bytes(plan, _CPU) + use.peak_bytes
            if peak > plan.budget:
                text = f"kind {number}: measured {peak}, predicted {plan.peak_bytes}"
                found.wrong.append((label, f"{text}, budget {plan.budget}"))


def _bare_step(made: RandomModule, model: nn.Module, kind: Inputs) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    for value in kind:
        value.grad = None
    with made.context():
        output = model(*kind)
        loss = made.loss(output)
    loss.backward()
    del output, loss
    for parameter in model.parameters():
        parameter.grad = None
