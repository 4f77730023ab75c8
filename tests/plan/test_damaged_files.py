"""Truncated, flipped and hostile plan files: one PlanFileError each, never anything else."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.api.plan import Plan
from memopt.errors import PlanFileError
from memopt.files import envelope
from memopt.files.envelope import pack, unpack
from memopt.files.plan_file import encode
from memopt.models.generate import random_graph
from memopt.models.instances import rotor_toy
from memopt.plan_record import BaselineFigures
from memopt.programs.replay import replay
from memopt.strategies import Sequential, Status
from tests.plan.edited import decode
from tests.random_programs import random_placement, random_program


def chain_plan() -> Plan:
    return memopt.plan(rotor_toy(), budget="min", strategy="rotor")


def graph_plan(seed: int = 3) -> Plan:
    """A plan with swaps, recomputation and a placement, made by hand around a random program."""
    rng = random.Random(seed)
    graph = random_graph(rng, 5, implementations=True)
    program = random_program(rng, graph, recomputations=2, swaps=2)
    program = random_placement(rng, graph, program)
    timeline = replay(graph, program, memopt.Device())
    return Plan(
        status=Status.FEASIBLE,
        strategy=Sequential(),
        budget=None,
        peak_bytes=timeline.placed_peak_bytes,
        resident_bytes=graph.resident_bytes,
        step_time_s=timeline.time_s,
        lower_bound_s=0.0,
        baseline=BaselineFigures(timeline.peak_bytes, timeline.time_s, False),
        device=memopt.Device(),
        program=program,
        graph=graph,
        host_peak_bytes=timeline.host_peak_bytes,
        compute_time_s=graph.compute_time_s,
        stats={"seconds": float("nan"), "rows": (1, 2), 3: {"deep": [object]}},
    )


@pytest.fixture(scope="module", params=["chain", "graph"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return chain_plan() if request.param == "chain" else graph_plan()


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def test_loads(file: Path, plan: Plan) -> None:
    loaded = memopt.load(str(file))
    assert loaded.program == plan.program
    assert loaded.chain_steps == plan.chain_steps
    assert loaded.graph == plan.graph
    assert json.loads(file.read_bytes())["format"] == "memopt plan"
    assert not loaded.stats or set(map(type, loaded.stats)) == {str}


def test_every_truncation_is_found(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    other = tmp_path / "cut.json"
    for length in [*range(120), *random.Random(0).sample(range(120, len(data)), 60), len(data) - 1]:
        other.write_bytes(data[:length])
        with pytest.raises(PlanFileError, match=r"damaged|not a memopt plan file"):
            memopt.load(other)


def test_every_flipped_bit_is_found(file: Path) -> None:
    data = bytearray(file.read_bytes())
    rng = random.Random(1)
    places = [*range(100), *rng.sample(range(100, len(data)), 400), len(data) - 1]
    for place in places:
        bit = 1 << rng.randrange(8)
        data[place] ^= bit
        with pytest.raises(PlanFileError, match=r"damaged|not a memopt plan file"):
            unpack(bytes(data))
        data[place] ^= bit


def test_what_follows_the_file_is_found(file: Path) -> None:
    with pytest.raises(PlanFileError, match="damaged"):
        unpack(file.read_bytes() + b" ")


def seal(rest: bytes) -> bytes:
    """A file with a right checksum around anything that starts with a brace."""
    digest = hashlib.sha256(rest).hexdigest().encode()
    return b'{"checksum":"' + digest + b'",' + rest[1:]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (b'{"format":"memopt plan","value":{},"version":2}', "version 2"),
        (b'{"format":"memopt plan","value":{},"version":true}', "whole number"),
        (b'{"format":"memopt plan","value":{}}', "version None"),
        (b'{"format":"else","value":{},"version":1}', "not a memopt plan"),
        (b'{"format":"memopt plan","value":{},"version":1,"more":1}', "no field 'more'"),
        (b'{"format":"memopt plan","value":[],"version":1}', "an object"),
        (b'{"format":"memopt plan","value":{},"value":{},"version":1}', "twice"),
        (b'{"format":"memopt plan","value":{},"version":1', "not a memopt file"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":' + b"9" * 5000 + b"}", "not a memopt file"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a memopt file"),
        (b'{"a":"\xff"}', "not a memopt file"),
        (b"{\x00}", "not a memopt file"),
        (b'{"format":"memopt plan","value":{"a":1e999},"version":1}', "missing"),
    ],
)
def test_hostile_text(rest: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(seal(rest))
    with pytest.raises(PlanFileError, match=message):
        memopt.load(path)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a JSON value, containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from leaves(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = new
    return changed


DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]

WRONG = (None, True, -1, 0, 2**53, 2**60, 10**300, 0.5, 1e308, -1e308, "", "x", "inf", [], {}, DEEP)


@pytest.mark.parametrize("name", ["chain", "graph"])
def test_wrong_values_anywhere(name: str) -> None:
    """Whatever stands at any place: a PlanFileError, or a plan that passed the validator."""
    value = encode(chain_plan() if name == "chain" else graph_plan(5))
    rng = random.Random(2)
    places = list(leaves(value))
    rng.shuffle(places)
    refused = 0
    for path in places[:250]:
        for wrong in rng.sample(WRONG, 5):
            data = pack(replaced(value, path, wrong))
            try:
                found = decode(unpack(data))
            except PlanFileError:
                refused += 1
            else:
                found.summary()
    assert refused > 800


@pytest.mark.parametrize("name", ["chain", "graph"])
def test_missing_and_unknown_fields(name: str) -> None:
    value = encode(chain_plan() if name == "chain" else graph_plan())
    for path in leaves(value):
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        if not isinstance(inside, dict) or path[0] == "stats":
            continue
        whole = replaced(value, path, None)
        holder = whole
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]
        with pytest.raises(PlanFileError):
            decode(unpack(pack(whole)))


def test_an_invalid_program_is_named(plan: Plan) -> None:
    value = encode(plan)
    if not plan.is_of_chain:
        instructions = value["program"]["instructions"]
        instructions.pop(next(i for i, x in enumerate(instructions) if x[0] == "compute"))
        value["program"]["offsets"] = None
    else:
        value["chain_steps"].pop()
    with pytest.raises(PlanFileError, match="no valid plan"):
        decode(unpack(pack(value)))


def test_a_plan_over_its_budget_is_refused(plan: Plan) -> None:
    value = encode(plan)
    value["budget_bytes"] = plan.peak_bytes - 1
    with pytest.raises(PlanFileError, match=r"no valid plan.*budget"):
        decode(unpack(pack(value)))


def test_figures_that_are_not_the_plans_are_refused(plan: Plan) -> None:
    for name in ("peak_bytes", "step_time_s", "host_peak_bytes"):
        value = encode(plan)
        value["figures"][name] += 1
        with pytest.raises(PlanFileError, match="figures"):
            decode(unpack(pack(value)))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read"):
        memopt.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match="cannot read"):
        memopt.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    chain_plan().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        graph_plan().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        chain_plan().save(tmp_path / "none" / "plan.json")


def test_a_pipe_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    # A read would wait for somebody to write.
    with pytest.raises(PlanFileError, match="it is a pipe, no file"):
        memopt.load(path)
    with pytest.raises(PlanFileError, match="it is a pipe, no file"):
        chain_plan().save(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(PlanFileError, match="it is a device, no file"):
            memopt.load(device)
        link = tmp_path / Path(device).name
        link.symlink_to(device)
        with pytest.raises(PlanFileError, match="it is a device, no file"):
            chain_plan().save(link)
        assert link.is_symlink()
        assert stat.S_ISCHR(os.stat(device).st_mode)


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(PlanFileError, match="it is a folder, no file"):
        chain_plan().save(path)
    assert path.is_dir()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    chain_plan().save(link)
    assert link.is_symlink()
    assert memopt.load(target).program == memopt.load(link).program
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_file_that_is_larger_than_it_says_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    with path.open("wb") as file:
        file.write(b'{"checksum":"')
        file.truncate(2**40)
    with pytest.raises(PlanFileError, match="too many for a plan file"):
        memopt.load(path)


def test_a_file_that_grows_is_not_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.json"
    chain_plan().save(path)
    monkeypatch.setattr(envelope, "LARGEST_FILE_BYTES", path.stat().st_size)
    memopt.load(path)
    # The size said too little, as that of a file that grows does.
    real = os.fstat

    def shorter(handle: int) -> os.stat_result:
        found = list(real(handle))
        found[stat.ST_SIZE] = 0
        return os.stat_result(found)

    with path.open("ab") as file:
        file.write(b" " * 100)
    monkeypatch.setattr(os, "fstat", shorter)
    with pytest.raises(PlanFileError, match="more bytes than a plan file can have"):
        memopt.load(path)


@pytest.mark.parametrize("at", ["os.open", "os.fdopen", "os.fsync", "os.replace"])
def test_an_interrupted_save_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    path = tmp_path / "plan.json"
    chain_plan().save(path)
    before = path.read_bytes()
    plan = graph_plan()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
