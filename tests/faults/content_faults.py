"""Plan files that somebody has damaged, or written to do harm: checksums, figures and fingerprints
are right wherever the fault is a later one. Each is refused in one sentence, and nothing in it is
looked up, opened, imported or run."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import memopt
from memopt.api.plan import Plan
from memopt.errors import MemoptError, PlanFileError
from memopt.files.envelope import pack, unpack
from memopt.files.plan_file import encode, to_bytes
from tests.faults.fault import Part, Room, fault
from tests.faults.injected import error_of, fails_with
from tests.faults.subjects import LOSS, Model, adam, batch, built
from tests.plan.edited import decode, refigured
from tests.plan.test_damaged_files import graph_plan, leaves, seal

_REFUSED = "PlanFileError of one line"
_SAID: list[str] = []


@functools.cache
def planned(kind: str) -> Plan:
    """A plan of the small model: computed again, placed, moved, or of a whole step."""
    options: dict[str, dict[str, Any]] = {
        "rotor": {"strategy": "rotor", "budget": "min"},
        "placed": {"strategy": "store-all", "place": True},
        "moved": {"strategy": "offload-graph", "budget": "min"},
    }
    if kind == "graph":
        return graph_plan()
    model = built()
    if kind in options:
        return memopt.plan(model, batch()[0], progress=False, **options[kind])
    x, y = batch()
    return memopt.plan(
        model,
        x,
        loss_fn=LOSS,
        targets=(y,),
        optimizer=adam(model),
        strategy="rotor",
        budget="min",
        whole_step=True,
        progress=False,
    )


def kinds(room: Room) -> tuple[str, ...]:
    """Of which plans files are damaged: in the fast tests a cost model's, which is quickly made."""
    return ("graph", "rotor", "placed", "moved", "whole") if room.everywhere else ("graph",)


def value_of(kind: str) -> Any:
    """The content of a plan's file."""
    return json.loads(json.dumps(encode(planned(kind))))


def run(plan: Plan, kind: str) -> None:
    """Make a plan ready to run in a model of the user's."""
    model = built()
    if kind == "whole":
        plan.train_step(model, LOSS, adam(model))
    else:
        plan.apply(model)


_WATCHED: list[list[str] | None] = [None]
_HARM = ("open", "import", "exec", "subprocess.Popen", "os.system", "os.exec", "socket.connect")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    seen = _WATCHED[0]
    if seen is not None and event in _HARM:
        seen.append(f"{event} {arguments[0]!r}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What Python opens, imports or runs meanwhile."""
    if _audit not in _INSTALLED:
        sys.addaudithook(_audit)
        _INSTALLED.append(_audit)
    seen: list[str] = []
    _WATCHED[0] = seen
    try:
        yield seen
    finally:
        _WATCHED[0] = None


_INSTALLED: list[Any] = []


def refused(data: bytes, kind: str = "", harmless: bool = True) -> None:
    """The bytes of a file are refused in one line, when they are read, or (with a kind of plan)
    at the latest when the plan is applied."""
    found: list[Plan] = []
    with watched() as seen:
        error = error_of(lambda: found.append(decode(unpack(data))))
    assert error is None or not harmless or not seen, seen
    if error is None:
        assert kind, "it was read"
        error = error_of(lambda: run(found[0], kind))
        assert isinstance(error, MemoptError), error
    else:
        assert isinstance(error, PlanFileError), error
    assert "\n" not in str(error)


@fault(Part.CONTENT, "a file is cut off anywhere", _REFUSED)
def cut(room: Room) -> int:
    happened = 0
    for kind in kinds(room):
        data = to_bytes(planned(kind))
        for length in room.places(len(data) - 1, 20):
            if not room.everywhere or length % 61 == 0 or length < 200:
                refused(data[:length])
                happened += 1
    return happened


@fault(Part.CONTENT, "a bit is flipped anywhere", _REFUSED)
def flipped(room: Room) -> int:
    happened = 0
    for kind in kinds(room):
        data = bytearray(to_bytes(planned(kind)))
        for place in random.Random(0).sample(range(len(data)), 500 if room.everywhere else 20):
            bit = 1 << (place % 8)
            data[place] ^= bit
            refused(bytes(data))
            data[place] ^= bit
            happened += 1
    return happened


def texts(what: str, promise: str, rests: Callable[[], list[bytes]]) -> None:
    """A row of files with right checksums around what is no plan."""

    @fault(Part.CONTENT, what, promise)
    def _(_room: Room) -> int:
        for rest in rests():
            refused(seal(rest))
        return len(rests())


texts("a file is nested 100,000 deep", _REFUSED, lambda: [
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
])  # fmt: skip
texts("a file has NaN, Infinity, or a field twice", _REFUSED, lambda: [
    b'{"a":NaN}', b'{"a":-Infinity}', b'{"format":"memopt plan","value":{},"value":{}}',
])  # fmt: skip
texts("a file is no text", _REFUSED, lambda: [b'{"a":"\xff"}', b"{\x00}", b'{"\xed\xa0\x80":1}'])
texts("a file is of another version, or of another program", _REFUSED, lambda: [
    b'{"format":"memopt plan","value":{},"version":2}', b'{"format":"else","value":{},"version":1}',
    b'{"format":"memopt plan","value":{},"version":1e0}', b'{"format":"memopt plan","value":{}}',
])  # fmt: skip


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return _SAID.append, ("run",)


@fault(Part.CONTENT, "a file is a pickle that runs code", f"{_REFUSED}; the code does not run")
def pickled(room: Room) -> int:
    _SAID.clear()
    data = pickle.dumps(_Payload())
    path = room.folder / "plan.json"
    for content in (data, seal(b"{" + data)):
        path.write_bytes(content)
        fails_with(PlanFileError, "not a memopt", lambda: memopt.load(path))
    assert not _SAID
    return 2


def at_leaves(wanted: type, new: tuple[Any, ...], room: Room, few: int) -> int:
    """Write each of some values to places of a type, with right checksums."""
    happened = 0
    for kind in kinds(room):
        value = value_of(kind)
        places = [path for path in leaves(value) if type(at(value, path)) is wanted]
        random.Random(1).shuffle(places)
        for number, path in enumerate(places[: few * (8 if room.everywhere else 1)]):
            changed = copy.deepcopy(value)
            at(changed, path[:-1])[path[-1]] = new[number % len(new)]
            data = pack(changed)
            found: list[Plan] = []
            with watched() as seen:
                error = error_of(lambda data=data, found=found: found.append(decode(unpack(data))))
            assert error is None or isinstance(error, PlanFileError), error
            assert "\n" not in str(error)
            assert not seen, seen
            if found:
                # It may stand where nothing depends on it: notes, a solver's statistics.
                found[0].summary()
            happened += 1
    return happened


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@fault(
    Part.CONTENT,
    "numbers beyond any size, negative ones, or ones with a fraction, anywhere",
    "PlanFileError, or a plan that the validator has passed",
)
def numbers(room: Room) -> int:
    return at_leaves(int, (2**60, -1, 10**300, 0.5, 2**53, -(2**63)), room, 12)


@fault(
    Part.CONTENT,
    "paths, names of classes or of code in the place of texts",
    "PlanFileError, or a text; nothing is opened, imported or run",
)
def tricks(room: Room) -> int:
    new = ("../../../etc/passwd", "/dev/zero", "os.system", "__import__('os')", "a\nb", "\x00")
    return at_leaves(str, new, room, 12)


@fault(Part.CONTENT, "values of other types anywhere", "PlanFileError, or a plan that is valid")
def types(room: Room) -> int:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    new = (None, True, "x", {}, deep, 1e308)
    return sum(at_leaves(kind, new, room, 6) for kind in (list, dict, float, bool))


def _bigger_budget(value: Any) -> None:
    value["budget_bytes"] = 1


def _better_figures(value: Any) -> None:
    value["figures"]["peak_bytes"] -= 8


def _faster(value: Any) -> None:
    value["lower_bound_s"] = value["figures"]["step_time_s"] * 2


def _infeasible(value: Any) -> None:
    value["status"] = "infeasible"


def _another_call(value: Any) -> None:
    value["record"] = value["record"] or {}
    value["record"]["args"] = {"tuple": [{"tensor": ["float32", [2**40, 2**40], [1, 1], False]}]}


def _unknown_field(value: Any) -> None:
    value["code"] = "import os"


def _without_a_run(value: Any) -> None:
    rows = value["program"]["instructions"]
    del rows[next(i for i, row in enumerate(rows) if row[0] == "compute")]


EDITS: dict[str, Callable[[Any], None]] = {
    "a smaller budget than the plan needs": _bigger_budget,
    "a smaller peak than the program has": _better_figures,
    "a bound that no plan can have": _faster,
    "a status that no plan has": _infeasible,
    "a call larger than any memory": _another_call,
    "a field that is not of the format": _unknown_field,
    "a program that leaves an operator out": _without_a_run,
}


def _one_edit(edit: Callable[[Any], None], room: Room) -> int:
    for kind in kinds(room):
        value = value_of(kind)
        edit(value)
        refused(pack(value))
    return len(kinds(room))


for _name, _edit in EDITS.items():
    fault(Part.CONTENT, f"edited, the checksum right: {_name}", _REFUSED)(
        functools.partial(_one_edit, _edit)
    )


def _smaller(value: Any) -> None:
    for tensor in value["graph"]["tensors"]:
        if tensor["kind"] in ("activation", "gradient"):
            tensor["size_bytes"] = min(64, tensor["size_bytes"])
    rows = value["program"].get("offsets") or []
    closer = {offset: 64 * n for n, offset in enumerate(sorted({row[2] for row in rows}))}
    if rows:
        value["program"]["offsets"] = [[i, t, closer[offset]] for i, t, offset in rows]


def _buffer_as_input(value: Any) -> None:
    kinds = [tensor["kind"] for tensor in value["graph"]["tensors"]]
    value["graph"]["tensors"][kinds.index("buffer")]["kind"] = "input"


def _renamed(value: Any) -> None:
    value["graph"]["operators"][0]["name"] += "_"


def _other_reads(value: Any) -> None:
    one = next(o for o in value["graph"]["operators"] if len(o["reads"]) > 1)
    one["reads"] = one["reads"][:-1]


CONSISTENT: dict[str, Callable[[Any], None]] = {
    "smaller tensors, closer together": _smaller,
    "a buffer that is called an input": _buffer_as_input,
    "an operator with another name": _renamed,
    "an operator that reads less than it does": _other_reads,
}


def _one_consistent(edit: Callable[[Any], None], room: Room) -> int:
    happened = 0
    for kind in kinds(room)[1:]:
        value = value_of(kind)
        edit(value)
        harmful = refigured(value)
        if harmful is not None:
            # Read, it is a plan like any other; the model it is applied to has another graph.
            refused(pack(harmful), kind, harmless=False)
            happened += 1
    return happened


for _name, _edit in CONSISTENT.items():
    fault(
        Part.CONTENT,
        f"edited, with all checksums, figures and fingerprints right: {_name}",
        "PlanFileError when it is applied: the model has another graph",
        slow=True,
    )(functools.partial(_one_consistent, _edit))


@fault(
    Part.CONTENT,
    "a plan of another model is applied",
    "PlanFileError that names what differs",
    slow=True,
)
def other_model(_room: Room) -> int:
    data = to_bytes(planned("rotor"))
    other = Model()
    other.last = nn.Linear(8, 4)
    fails_with(PlanFileError, "last", lambda: decode(unpack(data)).apply(other))
    return 1
