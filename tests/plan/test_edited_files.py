"""Plan files that were edited, their checksum right: what is wrong with one is refused in a
sentence, and what runs all the same equals the unplanned step, within the file's budget."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.errors import MemoptError, PlanFileError
from memopt.executor import apply
from memopt.executor.check import loss_of, unmetered_bytes
from memopt.files.envelope import pack, unpack
from memopt.files.plan_file import decode, encode
from memopt.models.codec import Reader
from memopt.models.encoding import read_device, read_graph, read_program
from memopt.models.judge import judge
from memopt.models.same_graph import as_captured
from memopt.models.serialize import fingerprint
from memopt.plan import Plan
from memopt.profiler.capture import Captured
from memopt.profiler.inputs import Call
from memopt.profiler.memory import metered

CPU = torch.device("cpu")


class Model(nn.Module):
    """Something to overwrite, to draw, to move and to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(32, 16))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm((self.first(x) * self.scale).relu()).sigmoid()
        out: Tensor = self.last(functional.dropout(x, 0.5).exp())
        return out


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def inputs() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, module: nn.Module) -> tuple[list[Tensor], int]:
    """What a step leaves behind, the model's own tensors too, and its peak."""
    x = inputs()
    model.zero_grad(set_to_none=True)
    for buffer in model.buffers():
        buffer.zero_()
    torch.manual_seed(3)
    with metered(CPU) as use:
        output = module(x)
        loss_of(output, None, (), ()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [output, *gradients, *model.parameters(), *model.buffers()]
    return [value.detach().clone() for value in found], use.peak_bytes


def plan(strategy: str, **options: Any) -> Plan:
    return memopt.plan(build(), inputs(), strategy=strategy, progress=False, **options)


MADE: dict[str, Callable[[], Plan]] = {
    "rotor": lambda: plan("rotor", budget="min"),
    "placed": lambda: plan("store-all", place=True),
    "offload-graph": lambda: plan("offload-graph", budget="min"),
    "rotor-menus": lambda: plan("rotor-menus", budget="min"),
}


@pytest.fixture(scope="module", params=MADE)
def value(request: pytest.FixtureRequest) -> Any:
    """The content of a real plan file."""
    return json.loads(json.dumps(encode(MADE[request.param]())))


@pytest.fixture
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a model is captured once, however many files are applied to it."""
    known: dict[str, Captured] = {}
    real = apply.capture

    def capture(model: nn.Module, call: Call, unused: Callable[[], Any]) -> Captured:
        leaves = [
            (x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
            for x in call.leaves
        ]
        key = repr((id(model), leaves, call.spec, unused(), apply.autocast_state()))
        if key not in known:
            known[key] = real(model, call, unused)
        return known[key]

    monkeypatch.setattr(apply, "capture", capture)


class Reference:
    """The unplanned step, and what an edited file may do beside it."""

    def __init__(self) -> None:
        self.model = build()
        self.expected, _ = step(self.model, self.model)

    def attempt(self, value: Any) -> str:
        """ "refused" or "ran"; anything else fails.

        Args:
            value: the content of an edited file.
        """
        data = pack(value)
        reason = ""
        try:
            found = decode(unpack(data))
            module = found.apply(self.model)
            step(self.model, module)
            after, peak_bytes = step(self.model, module)
        except MemoptError as error:
            reason = str(error)
        except ValueError as error:
            # What `apply` says of plans without a record.
            reason = str(error) if "made from a cost model" in str(error) else "\n"
        if reason:
            assert "\n" not in reason
            return "refused"
        assert all(map(torch.equal, after, self.expected))
        if found.budget is not None:
            assert unmetered_bytes(found, CPU) + peak_bytes <= found.budget
        return "ran"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value, containers included."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def edited(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    at(changed, path[:-1])[path[-1]] = new
    return changed


TEXTS = (
    *("activation", "gradient", "parameter", "buffer", "input", "constant", "output"),
    *("forward", "backward", "update", "compute", "free", "loss", "swap out"),
    *("", "x", "y\nz", "cuda", "float64", "bool", "float16"),
)
NUMBERS = (0, 1, 2, 3, 7, 64, -1, 2**40, 2**53)


def others(old: Any, rng: random.Random) -> list[Any]:
    """What to write instead of a value: of its own type, mostly."""
    if isinstance(old, bool):
        return [not old]
    if isinstance(old, int):
        return [rng.choice((old - 1, old + 1, old * 2)), rng.choice(NUMBERS)]
    if isinstance(old, float):
        return [rng.choice((0.0, old * 2, -1.0, 1e308))]
    if isinstance(old, str):
        return rng.sample(TEXTS, 2)
    if isinstance(old, list):
        return [rng.choice(([], old[:-1], old[::-1], old + old[:1]))]
    return [rng.choice((None, {}, [], 0, "x"))]


def refigured(value: Any) -> Any | None:
    """The same with the figures, budget and fingerprint that its own graph and program have, as
    somebody who means harm would write them; None if it has none."""
    changed = copy.deepcopy(value)
    try:
        graph = read_graph(Reader(changed["graph"], ""))
        program = read_program(Reader(changed["program"], ""))
        device = read_device(Reader(changed["device"], ""))
        violation, figures = judge(graph, None, program, None, device)
        structure = as_captured(graph, tuple(map(tuple, changed["record"].get("resized", ()))))
    except (MemoptError, ValueError, IndexError, TypeError, KeyError):
        return None
    if violation is not None or not math.isfinite(figures.time_s):
        return None
    changed["figures"] = {
        "peak_bytes": figures.peak_bytes,
        "step_time_s": figures.time_s,
        "host_peak_bytes": figures.host_peak_bytes,
    }
    changed["lower_bound_s"] = 0.0
    if changed["budget_bytes"] is not None:
        changed["budget_bytes"] = figures.peak_bytes
    changed["record"]["fingerprint"] = fingerprint(structure)
    return changed


def sweep(value: Any, edits: int, seed: int) -> list[str]:
    """Edit so many places of every part of a file; how it went."""
    rng = random.Random(seed)
    reference = Reference()
    assert reference.attempt(value) == "ran"
    parts: dict[str, list[tuple[Any, ...]]] = {}
    for path in places(value):
        parts.setdefault(path[0], []).append(path)
    outcomes = []
    for part, paths in parts.items():
        for path in rng.sample(paths, min(edits, len(paths))):
            for new in others(at(value, path), rng):
                changed = edited(value, path, new)
                outcomes.append(reference.attempt(changed))
                harmful = refigured(changed) if part in ("graph", "program", "device") else None
                if harmful is not None:
                    outcomes.append(reference.attempt(harmful))
    return outcomes


def test_edits_anywhere(value: Any, captured_once: None) -> None:
    outcomes = sweep(value, 8, seed=0)
    assert outcomes.count("refused") > len(outcomes) / 3
    assert "ran" in outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_many_edits_anywhere(value: Any, seed: int, captured_once: None) -> None:
    sweep(value, 150, seed)


def rotor_value() -> Any:
    return json.loads(json.dumps(encode(MADE["rotor"]())))


def refused(value: Any, why: str) -> None:
    with pytest.raises(PlanFileError, match=why) as caught:
        decode(unpack(pack(value))).apply(build())
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_not_the_fingerprints_is_refused() -> None:
    value = rotor_value()
    sizes = value["graph"]["tensors"][0]
    sizes["size_bytes"] += 64
    refused(value, "not the one that its fingerprint is of")


def test_a_file_cannot_make_a_parameter_its_own() -> None:
    """A parameter that the file calls an activation, for a kernel to write over."""
    value = json.loads(json.dumps(encode(plan("store-all"))))
    graph, program = value["graph"], value["program"]
    scale = [tensor["name"] for tensor in graph["tensors"]].index("scale")
    graph["tensors"][scale]["kind"] = "activation"
    graph["operators"][0]["writes"].append(scale)
    victim = next(
        i
        for i, one in enumerate(graph["operators"])
        if one["phase"] == "backward" and scale in one["reads"]
    )
    graph["operators"][victim]["in_place"] = [scale]
    for row in program["instructions"]:
        if row[0] == "compute" and row[1] == 0:
            row[2].append(scale)
        if row[0] == "compute" and row[1] == victim:
            row.append(scale)
    harmful = refigured(value)
    assert harmful is not None
    refused(harmful, r"captured graphs differ.*'scale'")


def test_a_file_cannot_overlap_addresses_by_shrinking_tensors() -> None:
    value = json.loads(json.dumps(encode(MADE["placed"]())))
    for tensor in value["graph"]["tensors"]:
        if tensor["kind"] in ("activation", "gradient"):
            tensor["size_bytes"] = min(64, tensor["size_bytes"])
    rows = value["program"]["offsets"]
    value["program"]["offsets"] = [[i, t, 64 * n] for n, (i, t, _) in enumerate(rows)]
    harmful = refigured(value)
    assert harmful is not None
    refused(harmful, "captured graphs differ")


def test_an_in_place_mark_is_not_believed() -> None:
    """Marks are in no fingerprint: the model's own graph has the say."""
    value = json.loads(json.dumps(encode(plan("store-all"))))
    graph, program = value["graph"], value["program"]
    computed = {t for one in graph["operators"] for t in one["writes"]}
    results = {*graph["outputs"], *graph["gradients"]}
    sizes = [tensor["size_bytes"] for tensor in graph["tensors"]]
    found = None
    for index, one in enumerate(graph["operators"]):
        for tensor in one["reads"]:
            free = tensor in computed - results and tensor not in one.get("in_place", ())
            if free and one["writes"] and sizes[tensor] == sizes[one["writes"][0]]:
                found = index, tensor
    assert found is not None
    index, tensor = found
    graph["operators"][index]["in_place"] = [tensor]
    for row in program["instructions"]:
        if row[0] == "compute" and row[1] == index:
            row[4:] = [tensor]
    program["instructions"] = [r for r in program["instructions"] if r != ["free", tensor]]
    harmful = refigured(value)
    assert harmful is not None
    refused(harmful, "overwrites")


def test_workspaces_of_a_file_count_only_where_they_are_more() -> None:
    """A file that says kernels need no scratch memory, to keep a budget that is too small."""
    model, image = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten()), torch.randn(8, 4, 16, 16)
    made = memopt.plan(model, image, budget="min", strategy="store-all", progress=False)
    assert made.graph is not None
    needed = [one.workspace_bytes for one in made.graph.operators]
    value = json.loads(json.dumps(encode(made)))
    for one in value["graph"]["operators"]:
        one["workspace_bytes"] = 0
    harmful = refigured(value)
    assert harmful is not None
    found = decode(unpack(pack(harmful)))
    assert found.budget is not None
    assert made.budget is not None
    if found.budget < made.budget:
        with pytest.raises(PlanFileError, match="does not hold for this model"):
            found.apply(model)
    else:
        assert max(needed) == 0


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_of_nothing_is_refused(budget: int) -> None:
    value = rotor_value()
    value["budget_bytes"] = budget
    refused(value, "a budget of at least 1 byte")


def test_a_host_budget_is_kept() -> None:
    made = memopt.plan(
        build(),
        inputs(),
        strategy="offload-graph",
        budget="min",
        host_budget=2**20,
        progress=False,
    )
    assert made.host_peak_bytes > 0
    value = json.loads(json.dumps(encode(made)))
    for row in value["strategy"]["fields"]:
        if row[0] == "host_budget_bytes":
            row[1] = made.host_peak_bytes - 1
    refused(value, "no valid plan")


@pytest.mark.parametrize("autocast", [["nonsense", None], ["bfloat16"], [None, None, None], [1, 2]])
def test_autocast_that_does_not_exist_is_refused(autocast: list[Any]) -> None:
    value = rotor_value()
    value["record"]["autocast"] = autocast
    refused(value, "autocast")


def test_a_call_larger_than_any_is_refused() -> None:
    value = rotor_value()
    value["record"]["args"]["tuple"][0]["tensor"][1] = [2**40, 2**40]
    refused(value, "larger than any input")


def test_a_status_and_a_bound_that_no_plan_has_are_refused() -> None:
    value = rotor_value()
    refused({**value, "status": "infeasible"}, "the status of a plan")
    refused({**value, "lower_bound_s": value["figures"]["step_time_s"] * 2}, "a lower bound")
    refused({**value, "lower_bound_s": -1.0}, "at least 0")


def test_whole_steps_are_checked_like_modules() -> None:
    def whole(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    model, target = build(), torch.zeros(32, 8)
    made = memopt.plan(
        model,
        inputs(),
        strategy="rotor",
        budget="min",
        loss_fn=functional.mse_loss,
        targets=(target,),
        optimizer=whole(model),
        whole_step=True,
        progress=False,
    )
    value = json.loads(json.dumps(encode(made)))
    fresh = build()
    decode(unpack(pack(value))).train_step(fresh, functional.mse_loss, whole(fresh))
    kinds = [tensor["kind"] for tensor in value["graph"]["tensors"]]
    value["graph"]["tensors"][kinds.index("buffer")]["kind"] = "input"
    harmful = refigured(value)
    assert harmful is not None
    with pytest.raises(PlanFileError, match=r"captured steps differ.*running") as caught:
        decode(unpack(pack(harmful))).train_step(fresh, functional.mse_loss, whole(fresh))
    assert "\n" not in str(caught.value)


def test_a_plan_in_memory_is_checked_against_another_model() -> None:
    made = MADE["rotor"]()
    made.apply(build())
    assert made.graph is not None
    assert made.profiled is not None
    tensors = [replace(one, size_bytes=max(0, one.size_bytes - 1)) for one in made.graph.tensors]
    shrunk = replace(made, graph=replace(made.graph, tensors=tuple(tensors)))
    with pytest.raises(PlanFileError, match="bytes in the plan and"):
        shrunk.apply(build())
