"""Versioned JSON for graphs, chains, programs, chain schedules and devices.

A document is {"format": "memopt", "version": 1, "kind": ..., "value": ...}. Equal values give
equal bytes: keys are sorted, times are floats, nothing depends on the machine. Reading checks
every field strictly and never executes anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeAlias

from memopt.errors import PlanFileError
from memopt.models.chain import Chain
from memopt.models.codec import Reader
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.steps import ChainStep
from memopt.programs import encoding
from memopt.programs.instructions import Program

VERSION = 1
FORMAT = "memopt"

Document: TypeAlias = Graph | Chain | Program | Device | tuple[ChainStep, ...]


def dumps(value: Document) -> bytes:
    """The canonical JSON document of a value, ASCII: equal values give equal bytes."""
    return canonical(encode(value))


def loads(data: bytes | str) -> Document:
    """Read a document written by `dumps`.

    Raises:
        PlanFileError: not JSON, another format or version, or a field that is missing,
            unknown or wrong; the message names the place.
    """
    return decode(Reader(parse(data), "document"))


def canonical(document: object) -> bytes:
    """The one way memopt writes a parsed JSON document."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def parse(data: bytes | str) -> object:
    """Parse JSON, refusing what is not standard JSON and repeated fields.

    Raises:
        PlanFileError: what is wrong with the text.
    """

    def refuse(constant: str) -> object:
        raise PlanFileError(f"not a memopt file: {constant} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanFileError(f"not a memopt file: the field {twice!r} is there twice")
        return fields

    try:
        parsed: object = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"not a memopt file: {error}") from None
    return parsed


def encode(value: Document) -> dict[str, Any]:
    """The document of a value, as what `json` writes (for embedding into a larger file)."""
    body: object
    if isinstance(value, Graph):
        kind, body = "graph", encoding.graph(value)
    elif isinstance(value, Chain):
        kind, body = "chain", encoding.chain(value)
    elif isinstance(value, Program):
        kind, body = "program", encoding.program(value)
    elif isinstance(value, Device):
        kind, body = "device", encoding.device(value)
    else:
        kind, body = "steps", encoding.steps(value)
    return {"format": FORMAT, "version": VERSION, "kind": kind, "value": body}


def decode(reader: Reader) -> Document:
    """Read an embedded document; see `encode` and `loads`."""
    fields = reader.entries()
    if "format" not in fields or fields["format"].value != FORMAT:
        raise PlanFileError(f"{reader.place}: not a memopt document")
    found = fields["version"].whole() if "version" in fields else None
    if found != VERSION:
        raise PlanFileError(
            f"{reader.place}: version {found!r}, but this memopt reads version {VERSION}"
        )
    _, _, kind, value = reader.fields("format", "version", "kind", "value")
    readers: dict[str, Callable[[Reader], Document]] = {
        "graph": encoding.read_graph,
        "chain": encoding.read_chain,
        "program": encoding.read_program,
        "device": encoding.read_device,
        "steps": encoding.read_steps,
    }
    if kind.text() not in readers:
        raise kind.fail(f"one of {', '.join(sorted(readers))}")
    return readers[kind.text()](value)


def fingerprint(graph: Graph) -> str:
    """SHA-256 (hex) of a graph's structure: names, sizes, who reads and writes what.

    Figures that are measured (times, workspaces, the loss's memory, resident bytes outside the
    graph) do not count, so a graph captured again has the same fingerprint.
    """
    structure = [
        [[tensor.name, int(tensor.size_bytes), tensor.kind.value] for tensor in graph.tensors],
        [
            [
                operator.name,
                encoding.indices(operator.reads),
                encoding.indices(operator.writes),
                operator.phase.value,
                operator.recomputable,
                operator.random,
                operator.target,
                [
                    [
                        choice.name,
                        encoding.maybe_indices(choice.reads),
                        encoding.maybe_indices(choice.writes),
                        choice.exact,
                    ]
                    for choice in operator.implementations
                ],
            ]
            for operator in graph.operators
        ],
        encoding.indices(graph.outputs),
        encoding.indices(graph.gradients),
        encoding.indices(graph.tangents),
        graph.tangents_held,
    ]
    return hashlib.sha256(canonical(structure)).hexdigest()
