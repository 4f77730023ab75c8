"""Every figure of a page is the plan's: read back from the page's own text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import accumulate
from operator import truediv
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.api.plan import Plan
from memopt.models.instances import rotor_toy
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.report.memory_profile import program_profile
from memopt.report.page import document
from memopt.report.page.data import FETCHED, LOSS, STAYS, TRANSIENT, WAIT, Subject, page_data
from memopt.report.page.document import Page, json_block
from memopt.report.page.figures import figure_items
from memopt.report.timeline_plot import COLORS
from memopt.report.work import moved, recomputed
from tests.network.test_replay import two_layers
from tests.plan.tiny import make, profiled, tight_plan
from tests.report.cases import EVIL, moving_plan, plan_of, random_plan, renamed

SEEDS = range(12)


def data_of(text: str) -> dict[str, Any]:
    """A page's data, found as a browser finds them."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def starts(data: dict[str, Any], program: dict[str, Any]) -> list[float]:
    """When each moment starts, as memopt/report/page/data.py says to work it out."""
    times = data["graphs"][program["graph"]]["runs"]["time_s"]
    waits = iter(program["waits"])
    found, now = [], 0.0
    for code in program["moments"]:
        begin, end = next(waits) if code == WAIT else (now, now + times[code] if code >= 0 else now)
        found.append(begin)
        now = end
    return found


def memory(data: dict[str, Any], program: dict[str, Any]) -> list[int]:
    """What memory holds during each moment, added up from the page's lifetimes."""
    graph = data["graphs"][program["graph"]]
    sizes, count = graph["tensors"]["bytes"], len(program["moments"])
    resident = sum(sizes[t] for t in program["resident"]) + graph["extra_resident_bytes"]
    change = [0] * (count + 1)
    rows = program["lifetimes"]
    begins = accumulate(rows[1::4])
    for tensor, begin, length in zip(rows[::4], begins, rows[2::4], strict=True):
        change[begin] += sizes[tensor]
        change[begin + length] -= sizes[tensor]
    held = list(accumulate(change))
    extra = {LOSS: graph["boundary_bytes"]}
    runs = graph["runs"]["workspace_bytes"]
    codes = program["moments"]
    return [
        resident + held[m] + (runs[code] if code >= 0 else extra.get(code, 0))
        for m, code in enumerate(codes)
    ]


@pytest.mark.parametrize("made", [random_plan, moving_plan])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_is_the_replay(seed: int, made: Callable[[int], Plan]) -> None:
    plan = made(seed)
    data = data_of(plan.report(points=0).html)
    program = data["programs"][data["plans"][data["opened"]]["program"]]
    timeline = replay(plan.graph, plan.program, plan.device)
    codes = program["moments"]
    steps = [m for m, code in enumerate(codes) if code != WAIT]
    positions = plan.program.steps
    assert len(steps) == len(positions)
    during, when = memory(data, program), starts(data, program)
    assert [during[m] for m in steps] == [timeline.step_bytes[p] for p in positions]
    assert [when[m] for m in steps] == [timeline.start_s[p] for p in positions]
    assert program["time_s"] == timeline.time_s == plan.step_time_s
    peak = timeline.peak_instruction
    assert peak is not None
    assert steps.index(program["peak"]) == positions.index(peak)
    waited = sum(end - begin for begin, end in program["waits"])
    assert waited == pytest.approx(timeline.total_stall_s)
    listed = (*timeline.transfers, *timeline.collectives, *timeline.host_updates)
    copies = [(x.tensor, x.start_s, x.end_s) for x in listed]
    assert [(t, begin, end) for t, _, begin, end in program["copies"]] == copies
    assert sum(size for _, size in program["resident_parts"]) == plan.resident_bytes


def test_collectives_are_a_stream_of_their_own() -> None:
    graph = two_layers()
    plan = plan_of(graph, store_all(graph), memopt.Device())
    data = data_of(plan.report(points=0).html)
    program = data["programs"][data["plans"][data["opened"]]["program"]]
    timeline = replay(plan.graph, plan.program, plan.device)
    assert timeline.collectives
    sent = [[x.tensor, 2, x.start_s, x.end_s] for x in timeline.collectives]
    assert [row for row in program["copies"] if row[1] == 2] == sent
    steps = [
        start
        for start, code in zip(starts(data, program), program["moments"], strict=True)
        if code != WAIT
    ]
    assert steps == [timeline.start_s[p] for p in plan.program.steps]


def test_the_pages_kinds_of_spans_are_those_that_have_a_colour() -> None:
    """A kind without a colour would end the page's script."""
    folder = Path(document.__file__).parent
    plots, step = ((folder / name).read_text("utf-8") for name in ("plots.js", "step.js"))
    listed = re.search(r"const KINDS = \[(.*?)\]", plots)
    assert listed is not None
    named = {
        *re.findall(r'"([^"]+)"', listed[1]),
        *re.findall(r'WAIT \? "([^"]+)" : runKind', plots),
    }
    assert re.findall(r'if \(stall\) found.push\(\["([^"]+)"', plots) == ["waiting"]
    body = step[step.index("function runKind") :].split("}")[0]
    named.update(re.findall(r'"(\w+)"', body))
    assert named == set(COLORS)


def test_a_wait_holds_what_is_live_before_what_waits() -> None:
    """Before a Free its tensor is still there; before a Compute its own results are not."""
    found = 0
    for seed in SEEDS:
        plan = random_plan(seed)
        data = data_of(plan.report(points=0).html)
        program = data["programs"][data["plans"][data["opened"]]["program"]]
        timeline = replay(plan.graph, plan.program, plan.device)
        stalled = [p for p, stall in enumerate(timeline.stall_s) if stall > 0]
        during = memory(data, program)
        waits = [during[m] for m, code in enumerate(program["moments"]) if code == WAIT]
        assert waits == [timeline.live_bytes[p - 1] for p in stalled]
        found += len(waits)
    assert found > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_the_table_of_modules_adds_up(seed: int) -> None:
    plan = random_plan(seed)
    graph, program = plan.graph, plan.program
    data = data_of(plan.report(points=0).html)
    rows = data["programs"][data["plans"][data["opened"]]["program"]]["modules"]
    parameters, kept, at_peak, runs, seconds, gone = map(sum, zip(*rows, strict=True))
    profile = program_profile(graph, program, plan.device)
    assert parameters == profile.layers["parameters"][0]
    assert at_peak + graph.resident_bytes == plan.peak_bytes
    extras = recomputed(graph, program)
    assert runs == sum(extra.count for extra in extras)
    assert seconds == pytest.approx(sum(extra.time_s for extra in extras))
    assert gone == sum(extra.size_bytes for extra in moved(graph, program))
    start = program.boundary
    assert start is not None
    live = [x for x in lifetimes(graph, program).device if x.is_live_at(start)]
    assert kept == sum(graph.tensors[x.tensor].size_bytes for x in live)


def test_flags_of_lifetimes() -> None:
    plan = random_plan(3)
    data = data_of(plan.report(points=0).html)
    flags = data["programs"][data["plans"][data["opened"]]["program"]]["lifetimes"][3::4]
    found = lifetimes(plan.graph, plan.program).device
    runs = dict(plan.program.computes)
    assert [bool(flag & TRANSIENT) for flag in flags] == [x.transient for x in found]
    assert [bool(flag & STAYS) for flag in flags] == [x.stays for x in found]
    fetched = [x.begin not in runs and x.begin != plan.program.boundary for x in found]
    assert [bool(flag & FETCHED) for flag in flags] == fetched
    assert any(fetched)


@pytest.fixture(scope="module")
def module_plan() -> Plan:
    return tight_plan(profiled(make("mlp")))


def test_a_plan_of_a_module(module_plan: Plan, tmp_path: Path) -> None:
    page = module_plan.report(tmp_path / "p.html", points=3)
    assert (tmp_path / "p.html").read_text(encoding="utf-8") == page.html
    data = data_of(page.html)
    assert data["title"] == "Sequential"
    shown = data["plans"][data["opened"]]
    for name in ("peak_bytes", "step_time_s", "overhead", "lower_bound_s", "gap"):
        assert shown[name] == getattr(module_plan, name)
    assert shown["budget_bytes"] == module_plan.budget
    texts = data["graphs"][0]["tensors"]["text"]
    assert texts.count("float32 [64, 32]") > 6
    assert "bool [64, 32]" in texts
    # Each cell of the curve is a plan of its own strategy within its own budget.
    cells = data["curve"]["cells"]
    assert {cell["strategy"] for cell in cells} == {"rotor", "store-all"}
    assert len(cells) == 1 + 3 + 1
    for cell in cells:
        plan = data["plans"][cell["plan"]]
        for name in ("peak_bytes", "step_time_s", "lower_bound_s", "budget_bytes"):
            assert plan[name] == cell[name]
        assert max(memory(data, data["programs"][plan["program"]])) == cell["peak_bytes"]
    peaks = [cell["peak_bytes"] for cell in cells[1:4]]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    own = data["programs"][data["graphs"][0]["own_program"]]
    graph = module_plan.graph
    assert max(memory(data, own)) == replay(graph, store_all(graph)).peak_bytes


def test_a_plan_from_a_file(module_plan: Plan, tmp_path: Path) -> None:
    module_plan.save(tmp_path / "p.json")
    loaded = memopt.load(tmp_path / "p.json")
    there, here = data_of(loaded.report(points=0).html), data_of(module_plan.report(points=0).html)
    assert there["programs"] == here["programs"]
    text = dict(zip(*[there["graphs"][0]["tensors"][x] for x in ("name", "text")], strict=True))
    assert text["0.linear.weight"] == "float32 [32, 32]"


def test_a_measured_step_beside_the_prediction(module_plan: Plan) -> None:
    model, inputs, loss = make("mlp")
    data = data_of(module_plan.report(None, model, inputs, loss_fn=loss, points=0).html)
    assert data["check"]["predicted_peak_bytes"] == module_plan.peak_bytes
    assert data["check"]["measured_time_s"] > 0
    names = [span[1] for span in data["measured"] if span[0] == "compute"]
    labels = [one.label(module_plan.graph) for _, one in module_plan.program.computes]
    assert [name for name in names if name in set(labels)] == labels


def test_a_bare_chain_and_a_comparison() -> None:
    made = memopt.curve(rotor_toy(), strategies=["rotor", "sequential"], points=4, progress=False)
    data = data_of(made.report(title="toy").html)
    assert data["title"] == "toy"
    assert data["curve"]["strategies"] == ["rotor", "sequential"]
    cells = [cell for cell in made.cells if cell.plan is not None]
    shown = [cell for cell in data["curve"]["cells"] if cell["plan"] is not None]
    assert [cell.peak_bytes for cell in cells] == [cell["peak_bytes"] for cell in shown]
    best = made.best()
    assert best is not None
    assert data["plans"][data["opened"]]["step_time_s"] == best.step_time_s
    assert "iframe" in made.report()._repr_html_()


def test_a_comparison_opens_with_what_fits_the_device() -> None:
    chain = rotor_toy()
    whole = memopt.curve(chain, strategies=["rotor"], points=4, progress=False)
    peaks = sorted(cell.peak_bytes for cell in whole.cells if cell.peak_bytes is not None)
    for capacity, opened in ((peaks[1], peaks[1]), (1, peaks[-1])):
        device = memopt.Device(capacity_bytes=capacity)
        made = memopt.curve(chain, strategies=["rotor"], points=4, device=device, progress=False)
        assert made.report().subject.opened.peak_bytes == opened


def test_a_comparison_without_plans_is_refused() -> None:
    made = memopt.compare(rotor_toy(), budgets=[1], strategies=["rotor"], progress=False)
    with pytest.raises(ValueError, match="no cell of this comparison has a plan"):
        made.report()


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    evil = renamed(random_plan(1))
    evil.save(tmp_path / "p.json")
    page = memopt.load(tmp_path / "p.json").report(points=0, title=EVIL[0]).html
    plain = random_plan(1).report(points=0, title="plain").html
    tags = re.compile(r"<\s*/?\s*[a-zA-Z!]+")
    assert tags.findall(page) == tags.findall(plain)
    data = data_of(page)
    assert data["notes"] == []
    assert [x.name for x in evil.graph.tensors] == data["graphs"][0]["tensors"]["name"]
    assert "owned" in page


def test_json_in_a_page_cannot_end_its_block() -> None:
    text = json_block({"a": ["</script>", "<!--", "&lt;", "\u2028\u2029"]})
    assert not set("<>&\u2028\u2029").intersection(text)
    assert json.loads(text) == {"a": ["</script>", "<!--", "&lt;", "\u2028\u2029"]}
    with pytest.raises(ValueError, match="JSON"):
        json_block(float("nan"))


def test_the_page_refers_to_nothing_outside(module_plan: Plan) -> None:
    page = module_plan.report(points=0).html
    own = page[: page.index('<script type="application/json"')]
    assert "default-src 'none'" in own
    assert "unsafe-eval" not in own
    assert "script-src 'sha256-" in own
    assert not re.search(r"(src|href)\s*=", own)
    scripts = page[page.rindex("<script>") :]
    for forbidden in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("):
        assert forbidden not in scripts


def test_without_bokeh_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figure_items.cache_clear()
    for name in [*sys.modules]:
        if name.partition(".")[0] == "bokeh":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(ImportError, match=r"pip install bokeh"):
        _ = random_plan(0).report(points=0).html


def test_planning_beside_a_plan_can_be_interrupted(module_plan: Plan) -> None:
    calls = 0

    def interrupting(_fraction: float, _what: str) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt

    data = data_of(module_plan.report(points=4, progress=interrupting).html)
    assert data["notes"] == ["Beside this plan, 2 of 5 were made: interrupted."]
    assert len(data["curve"]["cells"]) == 3
    with pytest.raises(ValueError, match="points"):
        module_plan.report(points=1)


def test_next_steps_are_the_ladder_s() -> None:
    made = memopt.curve(rotor_toy(), strategies=["rotor", "store-all"], points=5, progress=False)
    opened = made.cells[2].plan
    assert opened is not None
    subject = Subject("chain", made, opened, savings=(("adamw-8bit", 3), ("adam-8bit", 1)))
    data = page_data(subject)
    for plan in data["plans"]:
        rows = [row for row in plan["next"] if row["plan"] is not None]
        others = [one for one in data["plans"] if one["peak_bytes"] < plan["peak_bytes"]]
        cost = [(one["step_time_s"] - plan["step_time_s"]) for one in others]
        freed = [plan["peak_bytes"] - one["peak_bytes"] for one in others]
        less = [row for row in rows if row["bytes"] < 0]
        assert len(less) == bool(others)
        for row in less:
            added_s = data["plans"][row["plan"]]["step_time_s"] - plan["step_time_s"]
            assert added_s / -row["bytes"] == min(map(truediv, cost, freed))
            assert row["share"] == pytest.approx(added_s / plan["step_time_s"])
            assert row["text"].endswith((" (rotor)", " (store-all)"))
        assert all(row["bytes"] < 0 or row["share"] < 0 for row in rows)
        saved = [(row["bytes"], row["text"]) for row in plan["next"] if row["plan"] is None]
        assert saved == [(-3, "adamw-8bit frees 3 B"), (-1, "adam-8bit frees 1 B")]
    shown = data_of(Page(subject).html)["plans"]
    assert [plan["next"] for plan in shown] == [plan["next"] for plan in data["plans"]]
