"""Replays steps as CUDA graphs: few launches for a forward and few for a backward.

A placed program has fixed addresses within its arena and launches the same kernels in every step,
so that its two halves can be captured once and replayed. The first steps run uncaptured (libraries
choose kernels and make workspaces then), the next one is captured. The arena, the inputs, the
incoming gradients and all results of the step are static tensors. Inputs are copied in and
results copied out, so that users see a module like any other; parameters are read where they are.

Random operators draw anew in each replay: a capture registers the device's generator, and a replay
advances it (CUDAGeneratorImpl.cpp, "CUDA Graph-safe RNG states"). Transfers become a graph's own
copies: their streams join the capture by the events that they wait for, and the capture ends when
all that they were given has joined the compute stream (`StreamSwap.captured`). What no graph can
repeat runs between two of them (`between_graphs`, `memopt.executor.graph_segments`).

Not yet run on a GPU: a stand-in on the test accelerator records and replays what a capture would.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from memopt.errors import ExecutionError
from memopt.executor.graph_segments import Capturer, Run
from memopt.executor.installed import Installed
from memopt.executor.partial_backward import PartialBackward
from memopt.models.budget import format_bytes
from memopt.models.graph import TensorKind
from memopt.programs.instructions import Program
from memopt.step.backend import LARGEST_BLOCK_BYTES, is_on_host
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.nodes import HOST_RESULTS, is_random, tensors_of

WARM_UP = 2
"""Number of steps that run uncaptured first."""
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class CudaGraphs:
    """CUDA graphs of one device in one memory pool, which a forward and its backward share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            # Torch's own is made once, on the device that is current then: on another one a
            # capture would see no kernel, and its replay change nothing.
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def capture(self) -> Iterator[Callable[[], object]]:
        """Capture as `Capturer.capture` does."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                yield graph.replay


def static_bytes(lowering: Lowering, program: Program, library_bytes: int = 0) -> int:
    """Return the bytes that a captured step holds beyond the plan: copies of its inputs, of the
    incoming gradients, and of its results, what attention would otherwise leave on the host,
    results without an address of instructions between graphs (the largest twice, while it is
    copied), and the libraries' workspaces for the capture's stream."""
    graph = lowering.graph
    inputs = {i for i, tensor in enumerate(graph.tensors) if tensor.kind is TensorKind.INPUT}
    copied = sum(graph.tensors[i].size_bytes for i in inputs | graph.kept | {*graph.tangents})
    seeds = sum(len(HOST_RESULTS.get(node.target, ())) for node in lowering.nodes)
    placed = {(position, tensor) for position, tensor, _ in program.offsets or ()}
    runs = dict(program.computes)
    kept = [
        sum(
            graph.tensors[tensor].size_bytes
            for tensor in graph.operators[runs[position].op].writes
            if (position, tensor) not in placed
        )
        for position in between_graphs(lowering, program)
    ]
    kept_bytes = sum(kept) + max(kept, default=0)
    return copied + kept_bytes + seeds * LARGEST_BLOCK_BYTES + library_bytes


def between_graphs(lowering: Lowering, program: Program) -> dict[int, str]:
    """Return the instructions that no CUDA graph can repeat, by position, and why: they run between
    two graphs. So do instructions that read a tensor on the host which such an instruction, or the
    user, gives: a capture would keep its value."""
    storages = lowering.storages
    runs = Counter(run.op for _, run in program.computes)
    given = (held for node, held in storages.items() if node.op == "placeholder")
    changing = {tensor for held in given for tensor in held if tensor is not None}
    found: dict[int, str] = {}
    for position, run in program.computes:
        node = lowering.node_of(run.op, run.implementation)
        reason = _why_between(lowering, node, changing)
        if lowering.graph.operators[run.op].random and runs[run.op] > 1:
            reason = "it runs twice and must draw the same random numbers again"
        if reason is not None:
            found[position] = reason
            changing.update(t for t in storages[node] if t is not None)
    return found


def _why_between(lowering: Lowering, node: Node, changing: Container[int]) -> str | None:
    """Return why a kernel call cannot be captured, or would not do the same in a replay.

    Args:
        lowering: of the captured model.
        node: the call.
        changing: tensors whose values on the host differ from step to step.
    """
    if any(tag in _BY_VALUE for tag in getattr(node.target, "tags", ())):
        return "what it does depends on values"
    made, home = tensors_of(node), lowering.device
    here = [is_on_host(value, home) for value in made]
    read = [(one, value) for one in node.all_input_nodes for value in tensors_of(one)]
    there = [(one, value) for one, value in read if is_on_host(value, home)]
    if is_random(node) and all(here) and any(here):
        return "it draws random numbers on the host"
    if any(t in changing for one, _ in there for t in lowering.storages.get(one, ())):
        return "it reads what changes on the host"
    if any(here) and len(there) < len(read):
        return None if node.target in HOST_RESULTS else "it copies to the host"
    if not all(here) and any(value.dim() for _, value in there):
        return "it reads a tensor on the host"
    return None


def why_not(
    lowering: Lowering,
    program: Program,
    device: torch.device,
    spare_bytes: int | None,
    library_bytes: int = 0,
) -> str | None:
    """Return why a program's step cannot be captured; None if it can.

    Args:
        lowering: of the captured model.
        program: its plan.
        device: where it runs.
        spare_bytes: what the budget leaves beside the plan's peak; None: there is no limit.
        library_bytes: as of `static_bytes`.
    """
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the model is on {device}"
    if not program.offsets:
        return "its tensors have no fixed addresses: plan with place=True"
    needed_bytes = static_bytes(lowering, program, library_bytes)
    if spare_bytes is not None and needed_bytes > spare_bytes:
        return (
            f"copies of inputs and results and the capture's own workspaces take "
            f"{format_bytes(needed_bytes)}, for which the budget "
            f"leaves {format_bytes(max(0, spare_bytes))}: raise it by "
            f"{needed_bytes - spare_bytes} bytes"
        )
    return None


class _ReplayedForward:
    """A replayed forward that awaits its backward; the step's saved values hold it."""


class GraphedProgram:
    """An installed program whose halves are captured after a few steps, then replayed."""

    def __init__(self, program: Installed, captured: Captured, capturer: Capturer) -> None:
        self._program = program
        self._capturer = capturer
        self._inputs = [i for i, p in enumerate(captured.primals) if p.kind == "input"]
        self._calls = 0
        self._addresses: list[int | None] = []
        self._primals: list[Any] = []
        self._arguments: list[Any] = []
        self._forward_results: tuple[list[Any], list[Any]] = ([], [])
        self._gradients: list[Any] = []
        self._replay_forward: Callable[[], object] | None = None
        self._replay_backward: Callable[[], object] | None = None
        self._under_way: Callable[[], _ReplayedForward | None] = lambda: None

    def installed(self) -> Installed:
        """Return the program in the form that a planned module runs."""
        return replace(
            self._program,
            forward=self.forward,
            backward=self.backward,
            fork=self._no_fork,
            partial=self._partial,
            in_halves=None,
            # A replay gives all gradients at once, inside DistributedDataParallel, too.
            handover=None,
        )

    def forward(self, primals: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run the forward as `Installed.forward` does.

        Raises:
            ExecutionError: a parameter or buffer is elsewhere than when the step was captured, or
                the step before has not had its backward.
        """
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._program.forward(primals)
        if self._under_way() is not None:
            raise ExecutionError(
                "with cuda_graph=True one step is under way at a time, and the one before still "
                "waits for its backward: call backward() first, or drop its outputs"
            )
        if self._replay_forward is None:
            self._primals = list(primals)
            for i in self._inputs:
                self._primals[i] = _copy(primals[i])
            self._addresses = self._where(primals)
            self._forward_results, self._replay_forward = self._captured(
                lambda: self._program.forward(list(self._primals))
            )
        else:
            self._check_addresses(primals)
            for i in self._inputs:
                _fill(self._primals[i], primals[i], self._program.names[i])
            self._replay_forward()
        step = _ReplayedForward()
        self._under_way = weakref.ref(step)
        return [_copy(value) for value in self._forward_results[0]], [step]

    def backward(
        self, primals: list[Any], arguments: list[Any], saved: list[Any]
    ) -> tuple[Any, ...]:
        """Run the backward as `Installed.backward` does.

        Raises:
            ExecutionError: other gradients arrive than when the step was captured.
        """
        if not (saved and isinstance(saved[0], _ReplayedForward)):
            return self._program.backward(primals, arguments, saved)
        if self._replay_backward is None:
            self._arguments = [_copy(value) for value in arguments]
            (self._gradients, _), self._replay_backward = self._captured(
                lambda: (
                    list(
                        self._program.backward(
                            list(self._primals),
                            list(self._arguments),
                            list(self._forward_results[1]),
                        )
                    ),
                    [],
                )
            )
        else:
            for static, value in zip(self._arguments, arguments, strict=True):
                _fill(static, value, "a gradient of the outputs")
            self._replay_backward()
        saved.clear()
        return tuple(_copy(value) for value in self._gradients)

    def _captured(self, run: Run) -> tuple[tuple[list[Any], list[Any]], Callable[[], object]]:
        """Capture a half of the step, which runs with that."""
        assert self._program.segments is not None
        return self._program.segments.capture(self._capturer, run)

    def _partial(self, missing: frozenset[int]) -> PartialBackward | None:
        """Return the backward for missing gradients, as `Installed.partial` does.

        Raises:
            ExecutionError: that backward would skip kernels that the captured one computes.
        """
        found = self._program.partial(missing)
        if found is None or found.run is not None:
            raise ExecutionError(
                "some outputs got no gradient, and with cuda_graph=True a backward computes those "
                "of all: name the loss (loss_fn= of memopt.plan), or apply the plan without "
                "cuda_graph=True"
            )
        return found

    def _where(self, primals: Sequence[Any]) -> list[int | None]:
        """Return the addresses of tensors that are read in place; None for the others."""
        return [
            value.data_ptr() if isinstance(value, torch.Tensor) and i not in self._inputs else None
            for i, value in enumerate(primals)
        ]

    def _check_addresses(self, primals: Sequence[Any]) -> None:
        for name, before, now in zip(
            self._program.names, self._addresses, self._where(primals), strict=True
        ):
            if before != now:
                raise ExecutionError(
                    f"{name} is elsewhere than when the step was captured as a CUDA graph (was it "
                    "replaced, or the model moved?): call plan.apply(model, cuda_graph=True) again"
                )

    def _no_fork(self, saved: list[Any]) -> list[Any]:
        if saved and isinstance(saved[0], _ReplayedForward):
            raise ExecutionError(
                "retain_graph=True needs a step's memory for a second backward, and a captured "
                "step has it once: apply the plan without cuda_graph=True"
            )
        return self._program.fork(saved)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _fill(static: Any, value: Any, name: str) -> None:
    """Copy a value to the tensor that the captured kernels read, or check that it is unchanged."""
    both = isinstance(static, torch.Tensor), isinstance(value, torch.Tensor)
    if both == (True, True):
        if static.shape != value.shape or static.dtype != value.dtype:
            raise ExecutionError(
                f"{name} is {tuple(value.shape)} {value.dtype}, and the captured step's is "
                f"{tuple(static.shape)} {static.dtype}"
            )
        static.copy_(value)
    elif any(both) or static != value:
        raise ExecutionError(
            f"{name} is {value!r}, and was another when the step was captured as a CUDA graph: "
            "numbers and missing gradients are part of it"
        )
