"""Records plans of models and cost models, and compares them with those of other code.

    python -m tests.corpus --record corpus.json      # at the code before
    python -m tests.corpus --compare corpus.json     # at the code after: 0 if nothing differs

A line of a plan is its figures and a digest of its program: instructions, sizes and addresses.
Costs are estimated for a device, or kept with the corpus, so that they are the same at every run.
Plans that are not equal byte for byte must be no worse.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memopt
from memopt.programs.serialize import dumps, loads
from tests.zoo import get

LIMIT_S = 30.0
AS_FAST = 1.01
"""How much slower a plan may be that the limit stopped: those depend on the machine's load."""

MODULES: dict[str, tuple[float | str | None, dict[str, Any]]] = {
    "store-all": (None, {}),
    "rotor": (0.5, {}),
    "rotor min": ("min", {}),
    "rotor-optimal": (0.6, {"strategy": "rotor-optimal"}),
    "rotor-menus": (0.5, {"strategy": "rotor-menus"}),
    "sequential": (0.8, {"strategy": "sequential"}),
    "revolve": (0.7, {"strategy": "revolve"}),
    "greedy": (0.7, {"strategy": "greedy"}),
    "dynprog": (0.7, {"strategy": "dynprog"}),
    "vdnn": (0.8, {"strategy": "vdnn"}),
    "offload-graph": (0.6, {"strategy": "offload-graph"}),
    "placed": (0.7, {"place": True}),
    "ordered": (0.7, {"order": True, "place": True}),
    "accumulated": (0.9, {"accumulate": True}),
    "joint .6": (0.6, {"strategy": "joint"}),
    "joint .4": (0.4, {"strategy": "joint"}),
    "olla": (None, {"strategy": "olla"}),
    "auto": (0.5, {"strategy": "auto"}),
    "monet": (0.6, {"strategy": "monet"}),
}
"""Label → the budget, as the share of what is there beside what is resident, and arguments."""
STEPS: dict[str, tuple[float | str | None, dict[str, Any]]] = {
    "step": (0.7, {}),
    "step, olla": (None, {"strategy": "olla"}),
    "step, joint": (0.6, {"strategy": "joint"}),
    "step, offload-graph": (0.7, {"strategy": "offload-graph"}),
    "step, placed": (None, {"strategy": "store-all", "place": True}),
}
GRAPHS = "graphs"
FAMILIES = ("mlp", "unet", "resnet50", "gpt2", "llama")


def digest(plan: memopt.Plan) -> dict[str, Any]:
    """The figures of a plan, and a digest of everything that its program says."""
    text = repr(plan.program).encode()
    return {
        "peak": plan.peak_bytes,
        "resident": plan.resident_bytes,
        "host": plan.host_peak_bytes,
        "time": plan.step_time_s,
        "bound": plan.lower_bound_s,
        "status": str(plan.status),
        "steps": hashlib.sha256(repr(plan.chain_steps).encode()).hexdigest()[:16],
        "program": hashlib.sha256(text).hexdigest()[:16],
    }


class Models:
    """The models of the corpus, captured and priced for a device; and their whole steps, whose
    costs were measured where the corpus was recorded."""

    def __init__(self, graphs: dict[str, str]) -> None:
        self.graphs = graphs
        self._peaks: dict[tuple[str, bool], tuple[int, int]] = {}

    def planned(
        self, name: str, share: float | str | None, whole: bool, **arguments: Any
    ) -> dict[str, Any]:
        """The digest of a family's plan, or the sentence that refuses it."""
        if (name, whole) not in self._peaks:
            least = self._plan(name, whole, budget=None, strategy="store-all")
            self._peaks[name, whole] = (least.resident_bytes, least.peak_bytes)
        resident, peak = self._peaks[name, whole]
        if isinstance(share, float):
            arguments["budget"] = round(resident + share * (peak - resident))
        else:
            arguments["budget"] = share
        try:
            return digest(self._plan(name, whole, **arguments))
        except memopt.MemoptError as error:
            return {"refused": str(error)}

    def captured(self, name: str) -> dict[str, Any]:
        """The structure of a whole step that is captured anew: all but what was measured."""
        graph = self._step(name)
        text = repr(graph.tensors) + repr([(o.name, o.reads, o.writes) for o in graph.operators])
        return {"structure": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def _step(self, name: str) -> Any:
        family = get(name)
        model = family.build()
        return memopt.plan(
            model, family.inputs(), loss_fn=family.loss, whole_step=True, strategy="store-all",
            optimizer=torch.optim.AdamW(model.parameters()), cache=False, progress=False,
        ).graph  # fmt: skip

    def _plan(self, name: str, whole: bool, **arguments: Any) -> memopt.Plan:
        if whole:
            if name not in self.graphs:
                self.graphs[name] = dumps(self._step(name)).decode()
            graph = loads(self.graphs[name])
            return memopt.plan(graph, progress=False, time_limit_s=LIMIT_S, **arguments)
        family = get(name)
        return memopt.plan(
            family.build(), family.inputs(), mode="estimate", device="H100", cache=False,
            progress=False, time_limit_s=LIMIT_S, **arguments,
        )  # fmt: skip


def cases(models: Models) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name → what plans it."""
    for family in FAMILIES:
        yield f"{family}: captured step", partial(models.captured, family)
        for whole, rows in ((False, MODULES), (True, STEPS)):
            for label, (share, arguments) in rows.items():
                yield (
                    f"{family}: {label}",
                    partial(models.planned, family, share, whole, **arguments),
                )


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two lines are of one plan, or the second is of one that is no worse: as fast, within
    the first one's memory; where a limit stopped it, nearly as fast."""
    if before == after:
        return True
    if "refused" in before or "refused" in after:
        return False
    stopped = "OPTIMAL" not in before["status"].upper()
    slower = AS_FAST if stopped else 1 + 1e-9
    return bool(after["time"] <= slower * before["time"]) and all(
        after[figure] <= before[figure] for figure in ("peak", "host") if not stopped
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = json.loads(options.compare.read_text()) if options.compare else {}
    lines: dict[str, dict[str, Any]] = {}
    differing = 0
    models = Models(kept.pop(GRAPHS, {}))
    for name, plan in cases(models):
        if options.only not in name:
            continue
        lines[name] = plan()
        torch._dynamo.reset()
        verdict = ""
        if options.compare:
            before = kept.get(name, {"refused": "not recorded"})
            verdict = "equal" if before == lines[name] else "no worse"
            if not same(before, lines[name]):
                differing += 1
                verdict = f"DIFFERS from {before}"
        sys.stdout.write(f"{name}: {lines[name]} {verdict}\n")
        sys.stdout.flush()
        if options.record:
            options.record.write_text(json.dumps({GRAPHS: models.graphs, **lines}, indent=1))
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
