"""Measurements that others have published, as data: `measurements.json`, every row validated.

Facts only (numbers, configurations, where they stand), one row a line, in three parts:

- sources: by name, the title, the address (at a commit where there is one), the date of that state,
  and the licence of the repository that published it.
- models: by name, the shape: layers, hidden (width), heads, kv_heads, ffn (width inside the
  feed-forward), vocabulary (tokens, before any padding), and what else is not as usual.
- rows: one measured step each. `FIELDS` says what a field is and in which unit. Batches are one
  rank's micro-batch, in sequences; a step has `micro_batches` of them, 1 if it does not say. The
  ranks of a mesh are 1 where a row does not say. A missing field is not known, or not as usual.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("measurements.json")
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
_WORD, _FLAG = str, bool
_MEMORY = (2**20, 300 * 2**30)
"""What can be bytes of a GPU: a figure in MB or GiB is below."""
MEASURED: dict[str, tuple[float, float]] = {
    "peak_allocated_bytes": _MEMORY,  # torch.cuda.max_memory_allocated
    "peak_active_bytes": _MEMORY,  # the allocator's active blocks at most
    "peak_reserved_bytes": _MEMORY,  # torch.cuda.max_memory_reserved
    "peak_memory_bytes": _MEMORY,  # the source does not say which of them
    "peak_above_model_bytes": _MEMORY,  # allocated at most, less what the model took before
    "resident_bytes": _MEMORY,  # allocated between two steps
    "after_forward_bytes": _MEMORY,  # allocated between forward and backward
    "step_s": (1e-3, 1e3),  # of an optimizer's step, all its micro-batches
    "tokens_per_s": (1, 1e6),  # of one GPU
}
"""What is measured, and between which values it must be."""
_COUNTS = {
    name: (1, most)
    for name, most in {
        "gpus": 20_000, "dp": 20_000, "tp": 64, "pp": 64, "cp": 64, "ep": 512,
        "virtual_stages": 64, "chunk_group": 64, "sequence": 2**21, "batch": 1024,
        "micro_batches": 4096, "lora_rank": 4096, "trained_parameters": 10**12,
    }.items()
}  # fmt: skip
_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "tfloat32", "bfloat16", "float16", "float8"),  # of matrix products
    "parameters": ("float32", "bfloat16", "float16"),
    "gradients": ("float32", "bfloat16", "float16", "none"),  # none: updated in the backward
    "sharding": ("optimizer", "gradients", "parameters", "other"),  # over dp: ZeRO 1, 2, 3
    "attention": ("fused", "first flash", "scores", "flex"),  # FlashAttention's first version
    "softmax": ("float32",),  # of scores, where it is not in their own dtype
    "kernels": ("eager", "fused", "compiled", "written"),  # Transformer Engine's; by hand
    "loss": ("plain", "fused", "chunked"),
    "recompute": ("full", "selective"),
    "precision_policy": ("default", "pure"),  # MosaicML's, of gradients' reductions
}
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("name", "source", "where", "model", "gpu", "optimizer"), _WORD),
    **dict.fromkeys(("recompute_what", "schedule", "scaling", "offload", "adapter"), _WORD),
    **dict.fromkeys(("lora_layers", "quantized"), _WORD),
    **dict.fromkeys(("sequence_parallel", "uneven_stages", "cuda_graphs"), _FLAG),
    "overlapped_tensor_parallel": _FLAG,
    "whole_gradients": _FLAG,  # of flat parameters, not reduced before the last micro-batch (FSDP1)
    "state_bytes": (0, 20),  # the optimizer's for each trained parameter, float32 copies included
    "workspace_bytes": (0, 2**30),  # cuBLAS's for each thread, where CUBLAS_WORKSPACE_CONFIG says
    "lora_dropout": (0, 1),
    **_COUNTS,
    **_WORDS,
    **MEASURED,
}
"""Field → its type, its least and greatest value, or its values."""


@dataclass(frozen=True)
class Measurements:
    """The file: sources and models by name, and rows. See this module."""

    sources: Mapping[str, Mapping[str, str]]
    models: Mapping[str, Mapping[str, Any]]
    rows: tuple[Mapping[str, Any], ...]

    def __post_init__(self) -> None:
        """Check every source, model and row.

        Raises:
            ValueError: names the row, the field and what is wrong.
        """
        for name, source in self.sources.items():
            if (
                set(source) != {"title", "url", "date", "licence"}
                or "https://" not in source["url"]
            ):
                raise ValueError(f"source {name!r} needs title, url, date and licence")
            date.fromisoformat(source["date"])
        for name, model in self.models.items():
            counts = [model.get(one, 0) for one in _SHAPE if model.get("kind") != "diffusion"]
            if not all(isinstance(one, int) and one > 0 for one in counts):
                raise ValueError(f"model {name!r} needs whole positive {', '.join(_SHAPE)}")
        names = [row.get("name") for row in self.rows]
        for row, name in zip(self.rows, names, strict=True):
            problem = "it is there twice" if names.count(name) > 1 else _problem(self, row)
            if problem:
                raise ValueError(f"row {name!r}: {problem}")


def _problem(all_of: Measurements, row: Mapping[str, Any]) -> str:
    for field, value in row.items():
        wanted = FIELDS.get(field)
        if wanted is None:
            return f"there is no field {field!r}"
        if isinstance(wanted, type):
            good = isinstance(value, wanted)
        elif isinstance(wanted[0], str):
            good = value in wanted
        else:
            whole = isinstance(value, int) or not (field in _COUNTS or field.endswith("_bytes"))
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and whole and wanted[0] <= value <= wanted[1]
        if not good:
            return f"{field} is {value!r}, not {wanted}"
    if row.get("source") not in all_of.sources:
        return f"its source {row.get('source')!r} is not listed"
    if row.get("model", "") and row["model"] not in all_of.models:
        return f"its model {row['model']!r} is not listed"
    if not MEASURED.keys() & row:
        return "it measures nothing"
    ranks = math.prod(row.get(one, 1) for one in ("dp", "tp", "pp", "cp"))
    if "dp" in row and row["gpus"] != ranks:
        return f"dp, tp, pp and cp make {ranks} ranks, not {row['gpus']}"
    return _unlike(row)


def _unlike(row: Mapping[str, Any]) -> str:
    """Say which two figures of a row contradict each other; "": none."""
    most, reserved = row.get("peak_allocated_bytes"), row.get("peak_reserved_bytes")
    for less in ("resident_bytes", "after_forward_bytes"):
        if most is not None and row.get(less, 0) > most:
            return f"{less} is more than peak_allocated_bytes"
    if most is not None and reserved is not None and reserved < most:
        return "peak_reserved_bytes is less than peak_allocated_bytes"
    if {"step_s", "tokens_per_s", "sequence", "batch"} <= row.keys():
        rate = tokens(row) / row["step_s"]
        if not 0.95 < rate / row["tokens_per_s"] < 1.05:
            return f"its step is {rate:,.0f} tokens/s, not {row['tokens_per_s']:,}"
    return ""


def tokens(row: Mapping[str, Any]) -> float:
    """Return the tokens of one step for each GPU."""
    ranks = math.prod(row.get(one, 1) for one in ("tp", "pp", "cp"))
    return row["sequence"] * row["batch"] * row.get("micro_batches", 1) / ranks


@cache
def measurements() -> Measurements:
    """Read and check `measurements.json`."""
    found = json.loads(PATH.read_text(encoding="utf-8"))
    return Measurements(found["sources"], found["models"], tuple(found["rows"]))


@cache
def _by_name() -> dict[str, Mapping[str, Any]]:
    return {row["name"]: row for row in measurements().rows}


def row_of(name: str) -> Mapping[str, Any]:
    """Return the published row of that name."""
    return _by_name()[name]
