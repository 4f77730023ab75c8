"""Random modules under plans: planned steps equal eager's, bit for bit, in memory.

`sweep_module` trains three steps of each distinct plan of a module beside eager, and compares
outputs, gradients, buffers, parameters and random state bit for bit, the measured peak with
budget and prediction, and all that the user owns before and after planning. `every_plan` makes a
plan of every strategy; `python -m tests.fuzz sweep` runs that on many modules.
"""

from __future__ import annotations

import collections
import copy
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt.executor.check import unmetered_bytes
from memopt.pricing.baseline import clear_gradients
from memopt.pricing.memory import metered
from memopt.profiler import Loss, MeasureOptions, Profiled, profile_model
from memopt.step.inputs import to_call
from memopt.step.memory_layout import same_strides
from memopt.strategies import Solution, Strategy, resolve
from memopt.strategies.base import CostModel
from memopt.user_code.restored_state import state_restored
from tests.sweeps.grammar import RandomModule

PASSES: dict[str, dict[str, bool]] = {
    "plain": {},
    "place": {"place": True},
    "order": {"order": True},
}
_CPU = torch.device("cpu")


@dataclass
class Found:
    """What one module showed.

    Attributes:
        seed: of the module.
        cases: how many plans were made.
        ran: those of them whose program no other case of the module had, and that so were run.
        by_strategy: strategy → cases.
        operators: of the captured graph.
        refused: sentence → how often; refusals that memopt says on purpose.
        wrong: what differs, exceeds or crashes: (plan, what).
    """

    seed: int = 0
    cases: int = 0
    ran: int = 0
    by_strategy: collections.Counter[str] = field(default_factory=collections.Counter)
    operators: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """As JSON."""
        return json.dumps(vars(self))


Cases = Callable[[Profiled, Found], Iterator[tuple[str, memopt.Plan]]]
"""Makes plans of a module's profile, with names, and notes what is refused."""
Expect = Callable[[nn.Module, Profiled, RandomModule, int, Found], dict[str, Any]]
"""What so many steps of a module leave, as `train` gives it; may note what is wrong."""


def sweep_module(
    seed: int,
    made: RandomModule,
    cases: Cases,
    steps: int = 3,
    kernels: str = "aten",
    expect: Expect = lambda model, _profiled, made, steps, _found: train(model, None, made, steps),
) -> Found:
    """Profile a module, run its plans beside what is expected (eager's steps, if nothing else is
    said), and look at what planning has left."""
    found = Found(seed)
    model, inputs = made.build(), made.inputs()
    before = owned(model, inputs)
    try:
        profiled = profiled_quickly(made, model, inputs, kernels)
    except memopt.MemoptError as error:
        found.refused[sentence(error)] += 1
        return found
    except Exception as error:  # noqa: BLE001  # a crash is what is looked for
        found.wrong.append(("profile", sentence(error)))
        return found
    finally:
        compare(before, owned(model, inputs), "changed by planning", "profile", found)
    found.operators = len(profiled.graph.operators)
    start = copy.deepcopy(model.state_dict())
    expected = expect(copy.deepcopy(model), profiled, made, steps, found)
    known: set[str] = set()
    for label, plan in cases(profiled, found):
        found.cases += 1
        found.by_strategy[plan.strategy.name] += 1
        key = repr((plan.program, plan.budget))
        if key in known:
            continue
        known.add(key)
        found.ran += 1
        try:
            run_one(plan, label, model, start, made, expected, steps, found)
        except Exception as error:  # noqa: BLE001
            found.wrong.append((label, f"step: {sentence(error)}"))
    model.load_state_dict(start)
    clear_gradients(model, [])
    torch.set_rng_state(before["random state"])
    compare(before, owned(model, inputs), "changed by planning", "all cases", found)
    return found


def profiled_quickly(
    made: RandomModule, model: nn.Module, inputs: tuple[Tensor, ...], kernels: str = "aten"
) -> Profiled:
    """The model's profile; times do not matter here."""
    with made.context():
        return profile_model(
            model,
            inputs,
            loss=Loss(made.loss),
            options=MeasureOptions(cap_s=1e-9, max_rounds=1),
            kernels=kernels,
        )


@dataclass(frozen=True)
class Remembering(Strategy):
    """A strategy that solves nothing twice: the passes begin from the same plan.

    Attributes:
        inner: what solves.
        solved: what it solved: (cost model, budget) → solution.
    """

    inner: Strategy
    solved: dict[tuple[str, int | None], Solution] = field(compare=False)

    @staticmethod
    def of(name: str) -> Remembering:
        """The strategy of a name, with its own capabilities."""
        inner = resolve(name)
        own: dict[str, Any] = {"name": inner.name, "needs": inner.needs, "features": inner.features}
        if hasattr(inner, "exact_only"):
            own["exact_only"] = inner.exact_only
        kind = type("Remembering", (Remembering,), own)
        made: Remembering = kind(inner, {})
        return made

    def why_not(self, cost_model: CostModel) -> str | None:
        return self.inner.why_not(cost_model)

    def solve(self, cost_model: CostModel, budget_bytes: int | None, **options: Any) -> Solution:
        if isinstance(cost_model, memopt.Graph) and not self.features.place:
            cost_model = replace(cost_model, allocator_owned=())
        where = repr(cost_model)
        if (where, budget_bytes) not in self.solved:
            self.solved[where, budget_bytes] = self.inner.solve(cost_model, budget_bytes, **options)
        return self.solved[where, budget_bytes]


def every_plan(strategies: tuple[str, ...], limit_s: float) -> Cases:
    """Every strategy at its smallest budget and at one between that and eager's peak; plain,
    placed and reordered."""

    def cases(profiled: Profiled, found: Found) -> Iterator[tuple[str, memopt.Plan]]:
        for strategy in map(Remembering.of, strategies):
            for kind, extra in PASSES.items():
                wanted = {"strategy": strategy, "time_limit_s": limit_s, **extra}
                made = partial(plan_or_refusal, profiled, found, possible=True, **wanted)
                # The smallest budgets differ: at addresses, random operators are charged more.
                label = f"{strategy.name} min {kind}"
                least = made(label, budget="min")
                if least is None:
                    continue
                yield label, least
                peak = profiled.baseline.peak_bytes
                if least.budget is None or least.budget >= peak:
                    continue
                label = f"{strategy.name} between {kind}"
                larger = made(label, budget=(least.budget + peak) // 2)
                if larger is not None:
                    yield label, larger

    return cases


def plan_or_refusal(
    profiled: Profiled, found: Found, label: str, *, possible: bool, **wanted: Any
) -> memopt.Plan | None:
    """A plan; None: refused, which is counted, or wrong, which is noted. `possible`: the budget is
    large enough."""
    try:
        return memopt.plan(profiled, progress=False, **wanted)
    except (memopt.MemoptError, ValueError) as error:
        infeasible = isinstance(error, memopt.InfeasibleBudgetError)
        impossible = isinstance(error, ValueError) and "cannot plan this model" not in str(error)
        if (infeasible and possible) or impossible:
            found.wrong.append((label, sentence(error)))
        else:
            kind = "the budget is too small" if infeasible else sentence(error)
            found.refused[f"{label.split()[0]}: {kind}"] += 1
    except Exception as error:  # noqa: BLE001
        found.wrong.append((label, sentence(error)))
    return None


def run_one(
    made_plan: memopt.Plan,
    label: str,
    model: nn.Module,
    start: dict[str, Any],
    made: RandomModule,
    expected: dict[str, Any],
    steps: int,
    found: Found,
) -> None:
    """Three steps under a plan beside eager's, then a measured one."""
    model.load_state_dict(start)
    clear_gradients(model, [])
    planned = made_plan.apply(model)
    compare(expected, train(model, planned, made, steps), "differs", label, found)
    model.load_state_dict(start)
    clear_gradients(model, [])
    peak = measured_peak(made_plan, planned, model, made)
    if made_plan.budget is not None and peak > made_plan.budget:
        found.wrong.append((label, f"measured {peak} over budget {made_plan.budget}"))
    if peak > made_plan.peak_bytes:
        found.wrong.append((label, f"measured {peak} over predicted {made_plan.peak_bytes}"))


def measured_peak(
    made_plan: memopt.Plan, planned: nn.Module, model: nn.Module, made: RandomModule
) -> int:
    """Total bytes of a second step, the first one's gradients dropped."""
    call = to_call(made.inputs())
    with state_restored(model, call):
        for measured in (False, True):
            clear_gradients(model, call.tensors())
            with metered(_CPU) if measured else nullcontext() as use:
                with made.context():
                    output = planned(*call.args)
                    loss = made.loss(output)
                loss.backward()
            del output, loss
    assert use is not None
    return unmetered_bytes(made_plan, _CPU) + use.peak_bytes


def train(
    model: nn.Module, planned: nn.Module | None, made: RandomModule, steps: int, twice: bool = True
) -> dict[str, Any]:
    """Steps of plain gradient descent, the last one's backward run `twice`; all that each leaves
    behind, by name."""
    module = model if planned is None else planned
    record: dict[str, Any] = {}
    for step in range(steps):
        inputs = made.inputs()
        torch.manual_seed(100 + step)
        with made.context():
            output = module(*inputs)
            loss = made.loss(output)
        record |= returned(output, inputs, f"{step} ")
        if twice and step == steps - 1:
            loss.backward(retain_graph=True)
        loss.backward()
        for i, value in enumerate(inputs):
            record[f"{step} input {i}"] = value.detach().clone()
            record[f"{step} input {i} gradient"] = value.grad
        record |= descended(model, 0.05, f"{step} ")
        for name, value in model.state_dict().items():
            record[f"{step} state {name}"] = value.detach().clone()
        record[f"{step} random state"] = torch.get_rng_state()
    return record


def descended(model: nn.Module, rate: float, label: str = "") -> dict[str, Any]:
    """Update a model by its gradients, which it then has no more; those by name."""
    record = {}
    for name, parameter in model.named_parameters():
        record[f"{label}gradient {name}"] = parameter.grad
        if parameter.grad is not None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=rate)
            parameter.grad = None
    return record


def returned(output: Any, inputs: tuple[Tensor, ...], label: str) -> dict[str, Any]:
    """What a call returned: structure, values, and which of them are or share what."""
    leaves, structure = pytree.tree_flatten(output)
    record: dict[str, Any] = {f"{label}structure": structure}
    tensors = [*inputs, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            record[f"{label}output {i}"] = leaf
            continue
        record[f"{label}output {i}"] = leaf.detach().clone()
        record[f"{label}output {i} is"] = [leaf is other for other in tensors]
        record[f"{label}output {i} shares"] = [
            leaf.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            for other in tensors
        ]
        record[f"{label}output {i} differentiable"] = leaf.requires_grad
    return record


def owned(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """What planning must leave as it is."""
    found: dict[str, Any] = {"random state": torch.get_rng_state()}
    for name, value in model.state_dict().items():
        found[f"state {name}"] = value.detach().clone()
    for name, parameter in model.named_parameters():
        found[f"gradient {name}"] = parameter.grad
        found[f"trained {name}"] = parameter.requires_grad
    for i, value in enumerate(inputs):
        found[f"input {i}"] = value.detach().clone()
        found[f"input {i} gradient"] = value.grad
    for name, module in model.named_modules():
        found[f"attributes {name}"] = sorted(module.__dict__)
        found[f"training {name}"] = module.training
    return found


def compare(
    expected: dict[str, Any], got: dict[str, Any], verb: str, label: str, found: Found
) -> None:
    if list(expected) != list(got):
        found.wrong.append((label, f"{verb}: {sorted(set(expected) ^ set(got))[:3]}"))
        return
    names = [name for name in expected if not _equal(expected[name], got[name])]
    if names:
        first = names[0]
        a, b = expected[first], got[first]
        size = ""
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
            size = f" by {(a.double() - b.double()).abs().max():.1e}" if not a.is_complex() else ""
        found.wrong.append((label, f"{verb}: {first}{size} (and {len(names) - 1} more)"))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b))
    # The stride of a dimension of one element says nothing.
    same = a.shape == b.shape and a.dtype == b.dtype and same_strides(a, b.stride())
    return same and torch.equal(_bits(a), _bits(b))


def _bits(value: Tensor) -> Tensor:
    # A clone: `contiguous()` leaves dimensions of one element any stride, which a view refuses.
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.is_floating_point():
        # Which of two operands' not-a-numbers a sum hands on, with its sign, IEEE 754 leaves open:
        # a + b and b + a are the same numbers, but not the same bits there.
        flat.masked_fill_(flat.isnan(), torch.nan)
    return flat.view(torch.uint8)


def sentence(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/memopt/" in f.filename]
    where = f" [{inside[-1].filename.rsplit('/', 1)[-1]}:{inside[-1].lineno}]" if inside else ""
    return f"{type(error).__name__}: {str(error)[:160]}{where}"
