"""Order and placement of whole training steps, full size, captured under fake tensors.

    python benchmarks/olla_graphs.py [NAME ...] [--batches 1 32] [--folder GRAPHS]

Each step is forward + loss + backward + one in-place update per parameter (synthesised: it reads
the parameter and its gradient and needs no memory). Each line: the framework's peak with the
updates at the end and with updates early, the best order's peak, its bound, seconds; then the
placement of the original and of the best order: extent over bound, seconds. Sizes are in MiB
without resident bytes, allocations in blocks of 512 bytes; workspace is not measured here.
Captured graphs are kept in the folder, as JSON, if one is given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.models.graph import Graph, Operator, Phase, TensorKind
from memopt.models.liveness import store_all
from memopt.models.replay import replay
from memopt.models.validate import validate
from memopt.profiler.build import build
from memopt.profiler.capture import capture
from memopt.profiler.inputs import to_call
from memopt.strategies.olla import order_program, place_program
from memopt.strategies.olla.contract import eager
from memopt.strategies.olla.program_tasks import tasks_of
from tests import zoo

NAMES = (
    "resnet50", "vgg16", "googlenet", "mobilenet_v2", "densenet121", "efficientnet_b0",
    "inception_v3", "vit_b_16", "r3d_18", "unet", "mlp", "gpt2", "gpt2_no_dropout", "bert",
    "bert_no_dropout", "llama",
)  # fmt: skip
MIB = 2**20


class WithLoss(nn.Module):
    """A family's model and its loss as one module."""

    def __init__(self, family: zoo.Family, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, family.loss

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        """The loss."""
        return self.loss(self.model(*args, **kwargs))


def captured(family: zoo.Family, batch: int) -> Graph:
    """The graph of one training step at full size; nothing is computed."""
    with torch.device("meta"):
        model = family.build("paper")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        call = to_call(family.inputs("paper", batch=batch))
        whole = WithLoss(family, model)
        return with_updates(build(whole, capture(whole, call), 512).graph)


def with_updates(graph: Graph) -> Graph:
    """The graph with an in-place update of every parameter that has a gradient."""
    parameters = [i for i, t in enumerate(graph.tensors) if t.kind is TensorKind.PARAMETER]
    operators = list(graph.operators)
    for number, gradient in enumerate(dict.fromkeys(graph.gradients)):
        if gradient in graph.resident:
            continue
        reads = (gradient,)
        # Gradients come in the order of the parameters; frozen ones leave gaps, then sizes differ.
        if number < len(parameters):
            parameter = parameters[number]
            if graph.tensors[parameter].size_bytes == graph.tensors[gradient].size_bytes:
                reads = (gradient, parameter)
        operators.append(
            Operator(f"update.{number}", reads, (), 0.0, 0, Phase.UPDATE, recomputable=False)
        )
    return Graph(
        graph.tensors,
        operators,
        outputs=graph.outputs,
        tangents=graph.tangents,
        tangents_held=graph.tangents_held,
        boundary_bytes=graph.boundary_bytes,
        extra_resident_bytes=graph.extra_resident_bytes,
    )


def line(name: str, graph: Graph) -> tuple[str, dict[str, float]]:
    """One row of the table and its figures."""
    own = store_all(graph)
    resident = graph.resident_bytes
    began = time.perf_counter()
    best, ordering = order_program(graph, own, time_limit_s=60)
    order_s = time.perf_counter() - began
    tasks = tasks_of(graph, own).tasks
    early = tasks.peak(eager(tasks, tasks.topological))
    assert validate(graph, best) is None
    assert ordering.peak <= early
    placements = []
    for program in (own, best):
        began = time.perf_counter()
        placed, placement = place_program(graph, program, time_limit_s=60)
        placements.append((placement.gap, time.perf_counter() - began))
        assert validate(graph, placed) is None
    own_bytes = replay(graph, own).peak_bytes
    (own_gap, own_s), (best_gap, best_s) = placements
    mib = [(x - resident) / MIB for x in (own_bytes, early, ordering.peak, ordering.bound)]
    text = (
        f"{name:22s} {len(graph.operators):5d} {mib[0]:9.1f} {mib[1]:9.1f} {mib[2]:9.1f} "
        f"{mib[3]:9.1f} {100 * ordering.gap:7.4f}% {order_s:6.2f}  "
        f"{100 * own_gap:7.4f}% {own_s:6.2f}  {100 * best_gap:7.4f}% {best_s:6.2f}"
    )
    return text, {
        "order_s": order_s,
        "order_gap": ordering.gap,
        "own_gap": own_gap,
        "own_s": own_s,
        "best_gap": best_gap,
        "best_s": best_s,
        "reduction": 1 - (ordering.peak - resident) / (own_bytes - resident),
    }


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 32))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    print(
        f"{'model':22s} {'ops':>5s} {'framework':>9s} {'early':>9s} {'best':>9s} {'bound':>9s} "
        f"{'gap':>8s} {'s':>6s}  {'place':>8s} {'s':>6s}  {'reorder.':>8s} {'s':>6s}"
    )
    rows = []
    for name in arguments.names:
        for batch in arguments.batches:
            text, figures = line(f"{name} b{batch}", graph_of(name, batch, arguments.folder))
            print(text, flush=True)
            rows.append(figures)
    print(
        f"ordering: proved within 1% {sum(r['order_gap'] <= 0.01 for r in rows)} of {len(rows)}, "
        f"median {statistics.median(r['order_s'] for r in rows):.2f} s, most "
        f"{max(r['order_s'] for r in rows):.2f} s; placement of original orders: no fragmentation "
        f"{sum(r['own_gap'] == 0 for r in rows)}, of the best orders "
        f"{sum(r['best_gap'] == 0 for r in rows)}, median "
        f"{statistics.median(r[k] for r in rows for k in ('own_s', 'best_s')):.2f} s; mean "
        f"reduction {100 * statistics.mean(r['reduction'] for r in rows):.1f}%"
    )


def graph_of(name: str, batch: int, folder: Path | None) -> Graph:
    """The captured graph, from the folder if it is there."""
    from memopt.models.serialize import dumps, loads

    if folder is None:
        return captured(zoo.get(name), batch)
    path = folder / f"{name}_b{batch}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dumps(captured(zoo.get(name), batch)))
    graph = loads(path.read_bytes())
    assert isinstance(graph, Graph)
    return graph


if __name__ == "__main__":
    main()
