"""Versioned JSON for graphs, chains, programs, chain schedules and devices.

A document is {"format": "memopt", "version": 1, "kind": ..., "value": ...}. Equal values give
equal bytes: keys are sorted, times are floats, nothing depends on the machine. Reading checks
every field strictly and never executes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from operator import attrgetter
from typing import Any, TypeAlias

from memopt.errors import PlanFileError
from memopt.models import codec
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.reader import Reader, canonical, digest, parse
from memopt.models.steps import Steps
from memopt.programs.instructions import Program

VERSION = 1
FORMAT = "memopt"

Document: TypeAlias = Graph | Chain | Program | Device | Steps

_KINDS: Mapping[str, Any] = {
    "graph": Graph,
    "chain": Chain,
    "program": Program,
    "device": Device,
    "steps": Steps,
}


def dumps(value: Document) -> bytes:
    """Return the canonical JSON document of a value, ASCII: equal values give equal bytes."""
    kind = "steps" if isinstance(value, tuple) else type(value).__name__.lower()
    body = codec.encode(value, _KINDS[kind])
    return canonical({"format": FORMAT, "version": VERSION, "kind": kind, "value": body})


def loads(data: bytes | str) -> Document:
    """Read a document written by `dumps`.

    Raises:
        PlanFileError: not JSON, another format or version, or a field that is missing,
            unknown or wrong; the message names the place.
    """
    reader = Reader(parse(data), "document")
    fields = reader.entries()
    if "format" not in fields or fields["format"].value != FORMAT:
        raise PlanFileError(f"{reader.place}: not a memopt document")
    version = fields["version"].whole() if "version" in fields else None
    if version != VERSION:
        raise PlanFileError(
            f"{reader.place}: version {version!r}, but this memopt reads version {VERSION}"
        )
    kind = reader.fields("format", "version", "kind", "value")["kind"]
    if kind.text() not in _KINDS:
        raise kind.fail(f"one of {', '.join(sorted(_KINDS))}")
    document: Document = codec.read(_KINDS[kind.text()], fields["value"])
    return document


_TENSOR = attrgetter("name", "size_bytes", "kind")
_OPERATOR = attrgetter("name", "reads", "writes", "phase", "recomputable", "random", "target")
_IMPLEMENTATION = attrgetter("name", "reads", "writes", "exact")
_GRAPH = attrgetter("outputs", "gradients", "tangents", "tangents_held")


def fingerprint(graph: Graph) -> str:
    """Return the SHA-256 (hex) of a graph's structure: names, sizes, reads and writes.

    Measured figures (times, workspaces, the loss's memory, resident bytes outside the
    graph) do not count, so a graph captured again has the same fingerprint.
    """
    structure = [
        [_TENSOR(tensor) for tensor in graph.tensors],
        [
            [
                *_OPERATOR(operator),
                [_IMPLEMENTATION(choice) for choice in operator.implementations],
                *([astuple(operator.collective)] if operator.collective else ()),
            ]
            for operator in graph.operators
        ],
        *_GRAPH(graph),
    ]
    return digest(structure)
