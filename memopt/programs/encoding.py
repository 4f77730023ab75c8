"""How each value of the cost model stands in JSON, field by field; see `serialize`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from memopt.models.chain import Chain, Stage
from memopt.models.codec import INFINITY, Reader
from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.steps import ChainStep, Move
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)

_WORDS: dict[str, type[Free | SwapOut | SwapIn | DropHost]] = {
    "free": Free,
    "swap out": SwapOut,
    "swap in": SwapIn,
    "drop host": DropHost,
}


def indices(values: Iterable[int]) -> list[int]:
    """Tensor indices as plain integers."""
    return [int(value) for value in values]


def maybe_indices(values: Iterable[int] | None) -> list[int] | None:
    """Tensor indices, or None."""
    return None if values is None else indices(values)


def _number(value: float) -> float:
    """A float; −0.0, which equals 0.0, becomes 0.0."""
    return float(value) + 0.0


def _rate(value: float) -> float | str:
    return INFINITY if math.isinf(value) else _number(value)


def graph(value: Graph) -> dict[str, Any]:
    """A Graph."""
    return {
        "tensors": [
            {"name": x.name, "size_bytes": int(x.size_bytes), "kind": x.kind.value}
            for x in value.tensors
        ],
        "operators": [_operator(operator) for operator in value.operators],
        "outputs": indices(value.outputs),
        "gradients": indices(value.gradients),
        "tangents": indices(value.tangents),
        "tangents_held": value.tangents_held,
        "boundary_bytes": int(value.boundary_bytes),
        "extra_resident_bytes": int(value.extra_resident_bytes),
        **({"outside": indices(value.outside)} if value.outside else {}),
    }


def read_graph(reader: Reader) -> Graph:
    """The Graph that `graph` wrote."""
    (
        tensors,
        operators,
        outputs,
        gradients,
        tangents,
        tangents_held,
        boundary_bytes,
        extra_resident_bytes,
        outside,
    ) = reader.fields(
        "tensors",
        "operators",
        "outputs",
        "gradients",
        "tangents",
        "tangents_held",
        "boundary_bytes",
        "extra_resident_bytes",
        optional=("outside",),
    )
    parts = (
        tensors.each(_read_tensor),
        operators.each(_read_operator),
        outputs.wholes(),
        gradients.wholes(),
        tangents.wholes(),
        tangents_held.flag(),
        boundary_bytes.whole(),
        extra_resident_bytes.whole(),
        outside.optional(Reader.wholes) or (),
    )
    return reader.build(lambda: Graph(*parts))


def _read_tensor(reader: Reader) -> Tensor:
    name, size_bytes, kind = reader.fields("name", "size_bytes", "kind")
    return reader.build(lambda: Tensor(name.text(), size_bytes.whole(), kind.choice(TensorKind)))


def _operator(value: Operator) -> dict[str, Any]:
    return {
        "name": value.name,
        "reads": indices(value.reads),
        "writes": indices(value.writes),
        "time_s": _number(value.time_s),
        "workspace_bytes": int(value.workspace_bytes),
        "phase": value.phase.value,
        "recomputable": value.recomputable,
        "random": value.random,
        "module": value.module,
        "target": value.target,
        "implementations": [
            {
                "name": x.name,
                "time_s": _number(x.time_s),
                "workspace_bytes": int(x.workspace_bytes),
                "reads": maybe_indices(x.reads),
                "writes": maybe_indices(x.writes),
                "exact": x.exact,
                **({"in_place": indices(x.in_place)} if x.in_place else {}),
            }
            for x in value.implementations
        ],
        **({"in_place": indices(value.in_place)} if value.in_place else {}),
    }


def _read_operator(reader: Reader) -> Operator:
    (
        name,
        reads,
        writes,
        time_s,
        workspace_bytes,
        phase,
        recomputable,
        random,
        module,
        target,
        implementations,
        in_place,
    ) = reader.fields(
        "name",
        "reads",
        "writes",
        "time_s",
        "workspace_bytes",
        "phase",
        "recomputable",
        "random",
        "module",
        "target",
        "implementations",
        optional=("in_place",),
    )
    return reader.build(
        lambda: Operator(
            name.text(),
            reads.wholes(),
            writes.wholes(),
            time_s.number(),
            workspace_bytes.whole(),
            phase.choice(Phase),
            recomputable.flag(),
            random.flag(),
            module.text(),
            target.text(),
            implementations.each(_read_implementation),
            in_place.optional(Reader.wholes) or (),
        )
    )


def _read_implementation(reader: Reader) -> Implementation:
    name, time_s, workspace_bytes, reads, writes, exact, in_place = reader.fields(
        "name",
        "time_s",
        "workspace_bytes",
        "reads",
        "writes",
        "exact",
        optional=("in_place",),
    )
    return reader.build(
        lambda: Implementation(
            name.text(),
            time_s.number(),
            workspace_bytes.whole(),
            reads.optional(Reader.wholes),
            writes.optional(Reader.wholes),
            exact.flag(),
            in_place.optional(Reader.wholes) or (),
        )
    )


_STAGE_BYTES = (
    "output_bytes",
    "saved_bytes",
    "gradient_bytes",
    "forward_overhead_bytes",
    "backward_overhead_bytes",
    "parameter_gradient_bytes",
)


def _stage(value: Stage) -> dict[str, Any]:
    no_save = value.forward_no_save_overhead_bytes
    return {
        "name": value.name,
        **{name: _number(getattr(value, name)) for name in ("forward_time_s", "backward_time_s")},
        "forward_no_save_overhead_bytes": None if no_save is None else int(no_save),
        **{name: int(getattr(value, name)) for name in _STAGE_BYTES},
    }


def chain(value: Chain) -> dict[str, Any]:
    """A Chain."""
    return {
        "input_bytes": int(value.input_bytes),
        "stages": [_stage(stage) for stage in value.stages],
        "resident_bytes": int(value.resident_bytes),
        "input_gradient_bytes": int(value.input_gradient_bytes),
    }


def read_chain(reader: Reader) -> Chain:
    """The Chain that `chain` wrote."""
    input_bytes, stages, resident_bytes, input_gradient_bytes = reader.fields(
        "input_bytes", "stages", "resident_bytes", "input_gradient_bytes"
    )
    return reader.build(
        lambda: Chain(
            input_bytes.whole(),
            stages.each(_read_stage),
            resident_bytes.whole(),
            input_gradient_bytes.whole(),
        )
    )


def _read_stage(reader: Reader) -> Stage:
    name, forward_time_s, backward_time_s, no_save, *sizes = reader.fields(
        "name",
        "forward_time_s",
        "backward_time_s",
        "forward_no_save_overhead_bytes",
        *_STAGE_BYTES,
    )
    return reader.build(
        lambda: Stage(
            forward_time_s=forward_time_s.number(),
            backward_time_s=backward_time_s.number(),
            forward_no_save_overhead_bytes=no_save.optional(Reader.whole),
            name=name.text(),
            **{key: size.whole() for key, size in zip(_STAGE_BYTES, sizes, strict=True)},
        )
    )


def program(value: Program) -> dict[str, Any]:
    """A Program: ["compute", operator, [outputs], implementation or null] and, if the output takes
    over a storage, that tensor; ["loss"], ["free", tensor] and so on; offsets as [instruction,
    tensor, offset]; what is apart, if anything, as [instruction, tensor]."""
    return {
        "instructions": [_instruction(instruction) for instruction in value.instructions],
        "offsets": None if value.offsets is None else [indices(row) for row in value.offsets],
        **({"apart": [indices(row) for row in value.apart]} if value.apart else {}),
    }


def _instruction(value: Instruction) -> list[Any]:
    if isinstance(value, Compute):
        row = ["compute", int(value.op), indices(value.outputs), value.implementation]
        return row if value.in_place is None else [*row, int(value.in_place)]
    if isinstance(value, LossBoundary):
        return ["loss"]
    return [next(word for word, kind in _WORDS.items() if kind is type(value)), int(value.tensor)]


def read_program(reader: Reader) -> Program:
    """The Program that `program` wrote."""
    instructions, offsets, apart = reader.fields("instructions", "offsets", optional=("apart",))
    return Program(
        instructions.each(_read_instruction),
        offsets.optional(lambda rows: rows.each(_read_offset)),
        apart.optional(lambda rows: rows.each(_read_apart)) or (),
    )


def _read_offset(reader: Reader) -> tuple[int, int, int]:
    row = reader.wholes()
    if len(row) != 3:
        raise reader.fail("[instruction, tensor, offset]")
    return row[0], row[1], row[2]


def _read_apart(reader: Reader) -> tuple[int, int]:
    row = reader.wholes()
    if len(row) != 2:
        raise reader.fail("[instruction, tensor]")
    return row[0], row[1]


def _read_instruction(reader: Reader) -> Instruction:
    word, *rest = reader.items() or [reader]
    if word.value == "compute" and len(rest) in (3, 4):
        in_place = rest[3].whole() if len(rest) == 4 else None
        return Compute(rest[0].whole(), rest[1].wholes(), rest[2].optional(Reader.text), in_place)
    if word.value == "loss" and not rest:
        return LossBoundary()
    if isinstance(word.value, str) and word.value in _WORDS and len(rest) == 1:
        return _WORDS[word.value](rest[0].whole())
    raise reader.fail("an instruction")


def steps(value: Iterable[ChainStep]) -> list[list[Any]]:
    """A chain schedule: [move, stage] each."""
    return [[step.move.value, int(step.stage)] for step in value]


def read_steps(reader: Reader) -> tuple[ChainStep, ...]:
    """The schedule that `steps` wrote."""
    return reader.each(_read_step)


def _read_step(reader: Reader) -> ChainStep:
    pair = reader.items()
    if len(pair) != 2:
        raise reader.fail("[move, stage]")
    return ChainStep(pair[0].choice(Move), pair[1].whole())


def device(value: Device) -> dict[str, Any]:
    """A Device; infinite rates as "inf"."""
    capacity, back = value.capacity_bytes, value.from_host_bytes_per_s
    return {
        "name": value.name,
        "capacity_bytes": None if capacity is None else int(capacity),
        "to_host_bytes_per_s": _rate(value.to_host_bytes_per_s),
        "from_host_bytes_per_s": None if back is None else _rate(back),
        "transfer_latency_s": _number(value.transfer_latency_s),
        "duplex": value.duplex,
        "flops_per_s": {name: _rate(rate) for name, rate in value.flops_per_s.items()},
        "memory_bytes_per_s": _rate(value.memory_bytes_per_s),
        "launch_latency_s": _number(value.launch_latency_s),
        "flops_fraction": _number(value.flops_fraction),
        "memory_fraction": _number(value.memory_fraction),
        "block_bytes": int(value.block_bytes),
        "source": value.source,
    }


def read_device(reader: Reader) -> Device:
    """The Device that `device` wrote."""
    names = [
        "name",
        "capacity_bytes",
        "to_host_bytes_per_s",
        "from_host_bytes_per_s",
        "transfer_latency_s",
        "duplex",
        "flops_per_s",
        "memory_bytes_per_s",
        "launch_latency_s",
        "flops_fraction",
        "memory_fraction",
        "block_bytes",
        "source",
    ]
    field = dict(zip(names, reader.fields(*names), strict=True))
    return reader.build(
        lambda: Device(
            name=field["name"].text(),
            capacity_bytes=field["capacity_bytes"].optional(Reader.whole),
            to_host_bytes_per_s=field["to_host_bytes_per_s"].rate(),
            from_host_bytes_per_s=field["from_host_bytes_per_s"].optional(Reader.rate),
            transfer_latency_s=field["transfer_latency_s"].number(),
            duplex=field["duplex"].flag(),
            flops_per_s={k: v.rate() for k, v in field["flops_per_s"].entries().items()},
            memory_bytes_per_s=field["memory_bytes_per_s"].rate(),
            launch_latency_s=field["launch_latency_s"].number(),
            flops_fraction=field["flops_fraction"].number(),
            memory_fraction=field["memory_fraction"].number(),
            block_bytes=field["block_bytes"].whole(),
            source=field["source"].text(),
        )
    )
