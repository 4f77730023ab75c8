"""Runs Inductor on one region at a time.

C++ is compiled by a pool of processes. Generated modules wait for it when they are loaded; here
that wait is put off until every region is lowered, so that all compilers run at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from memopt.errors import MemoptError
from memopt.kernels.compiled.losses import nll_loss_backward, with_joined_losses
from memopt.models.locks import ForkedLock
from memopt.step.backend import autocast_off
from memopt.step.region_graph import Subgraph, TensorLayout
from memopt.torch_private.access import patched, private
from memopt.torch_private.inductor import inductor_set, inside_of, traced_with

_LOG = logging.getLogger(__name__)
_ONE_AT_A_TIME = ForkedLock()

REFUSALS = (
    RuntimeError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors that Inductor raises for a graph it cannot compile; its own are RuntimeErrors."""

_NO_COMPILER = (
    "kernels={kernels!r} needs a compiler, and there is none: {what}. kernels='aten', the default, "
    "needs none"
)

Run = Callable[[list[Any]], Any]


def check_compiler(device: torch.device, kernels: str) -> None:
    """Check that Inductor's compiler for a device is installed.

    Raises:
        MemoptError: it is missing; the message names what to install.
    """
    if device.type == "cpu":
        find = private("torch._inductor.cpp_builder.get_cpp_compiler")
        try:
            find()
        except REFUSALS as error:
            what = "install a C++ compiler (g++ or clang++) on the PATH, or name it in CXX"
            raise MemoptError(_NO_COMPILER.format(kernels=kernels, what=what)) from error
        return
    has_triton = private("torch.utils._triton.has_triton")
    if not has_triton():
        what = "install Triton (pip install triton) for this device"
        raise MemoptError(_NO_COMPILER.format(kernels=kernels, what=what))


def compiled(
    subgraphs: Mapping[str, Subgraph], progress: Callable[[float, str], None]
) -> dict[str, Run | str]:
    """Compile regions.

    Args:
        subgraphs: by their keys; each is compiled once.
        progress: called with (fraction, what); may raise KeyboardInterrupt to end it.

    Returns:
        For each key the compiled function, or why the region could not be compiled.
    """
    found: dict[str, Run | str] = {}
    put_off: list[Callable[[], None]] = []
    waits: dict[str, list[Callable[[], None]]] = {}
    total = max(1, len(subgraphs))
    # The graph contains the casts already.
    with _ONE_AT_A_TIME, _waits_put_off(put_off), autocast_off():
        for position, (key, one) in enumerate(subgraphs.items()):
            progress(0.5 * position / total, f"compiling region {position + 1} of {total}")
            del put_off[:]
            try:
                found[key] = _compile(one)
            except REFUSALS as error:
                found[key] = _reason(error)
            waits[key] = list(put_off)
    for position, (key, pending) in enumerate(waits.items()):
        progress(0.5 + 0.5 * position / total, f"compiling region {position + 1} of {total}")
        try:
            for wait in pending:
                wait()
        except REFUSALS as error:
            found[key] = _reason(error)
    return found


def _reason(error: BaseException) -> str:
    _LOG.debug("a region cannot be compiled", exc_info=error)
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@contextlib.contextmanager
def _waits_put_off(put_off: list[Callable[[], None]]) -> Iterator[None]:
    name = "torch._inductor.async_compile.AsyncCompile.wait"
    wait = private(name)

    def later(self: Any, scope: dict[str, Any]) -> None:
        put_off.append(lambda: wait(self, scope))

    with patched(name, later):
        yield


def _compile(one: Subgraph) -> Run:
    shapes = private("torch.fx.experimental.symbolic_shapes.ShapeEnv")()
    # Inductor's disk cache needs a shape environment.
    fake = private("torch._subclasses.fake_tensor.FakeTensorMode")
    fake_mode = fake(shape_env=shapes, static_shapes=True)
    compile_ = private("torch._inductor.compile_fx.compile_fx_inner")
    table = private("torch._inductor.decomposition.select_decomp_table")()
    decompositions = {**table, torch.ops.aten.nll_loss_backward.default: nll_loss_backward}
    make_fx = private("torch.fx.experimental.proxy_tensor.make_fx")
    with fake_mode, torch.no_grad():
        inputs = [_empty(layout) for layout in one.layouts]
        module = GraphModule({}, with_joined_losses(one.graph))
        traced = make_fx(module, decomposition_table=decompositions)(*inputs)
    output = traced.graph.output_node()
    results = output.args[0]
    for node, layout in zip(results, one.results, strict=True):
        value = node.meta["val"]
        if (tuple(value.shape), value.dtype) != (layout.shape, layout.dtype):
            raise ValueError(f"its result would be {TensorLayout.of(value)} instead of {layout}")
    output.args = (tuple(map(_laid_out, results, one.results)),)
    traced.recompile()
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    patch = inductor_set(reorder_for_peak_memory=False, fx_graph_cache=True)
    with patch, traced_with(fake_mode), torch.no_grad():
        made = compile_(traced, inputs)
    call: Run = made
    return call


def _laid_out(node: Node, layout: TensorLayout) -> Node:
    """Return a result with the wanted strides: Inductor chooses layouts freely."""
    value = node.meta["val"]
    if tuple(value.stride()) == layout.strides:
        return node
    force = private("torch._inductor.inductor_prims.force_stride_order")
    with node.graph.inserting_after(node):
        made = node.graph.call_function(force, (node, list(layout.strides)))
    with value.fake_mode:
        made.meta["val"] = _empty(layout)
    return made


_MADE: list[Run] = []
"""Inductor's compiled graphs, kept alive: they remove parts of their code when they die."""


def direct(run: Run) -> Run:
    """Return the inner function of a compiled region that has run: it skips the checks for
    profilers and autotuning at every call."""
    inner: Run | None = inside_of(run)
    if inner is None:
        return run
    _MADE.append(run)
    return inner


def _empty(layout: TensorLayout) -> torch.Tensor:
    return torch.empty_strided(
        layout.shape, layout.strides, dtype=layout.dtype, device=layout.device
    )
