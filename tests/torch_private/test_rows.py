"""Each row holds on the torch that is installed, and has its effect where its name is gone."""

from __future__ import annotations

import ast
import contextlib
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memopt.torch_private
from memopt.capture.capture import capture
from memopt.capture.lean_trace import real_values_uncopied
from memopt.errors import CaptureError
from memopt.step.inputs import to_call
from memopt.torch_private import access, aot, dynamo, inductor, modes, modules
from memopt.torch_private.distributed import timeout_of
from memopt.torch_private.rows import ROWS, TABLE
from memopt.torch_private.table import Row
from tests.torch_private.hiding import hide, of_another_torch, version

REQUIRED = [row for row in ROWS if row.required]
DEGRADED = [row for row in ROWS if not row.required]
HERE = Path(memopt.torch_private.__file__).parent


def named(row: Row) -> str:
    return row.name


def test_no_name_has_two_rows() -> None:
    assert len(ROWS) == len(TABLE)


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_the_installed_torch_has_it(row: Row) -> None:
    if access.expected(row):
        access.found(row)


@pytest.mark.parametrize("row", REQUIRED, ids=named)
def test_an_error_names_what_is_gone(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, row.name)
    ways: list[Callable[[], Any]] = [
        lambda: access.private(row.name),
        lambda: access.private_once(row.name),
        lambda: access.attribute(row.name),
        lambda: access.attribute_name(row.name),
        lambda: access.replace(row.name, None),
        lambda: _enter(access.required(row.name)),
        lambda: _enter(access.patched(row.name, None)),
    ]
    if access.expected(row):
        ways.append(lambda: access.known(row.name))
    for way in ways:
        with pytest.raises(CaptureError) as raised:
            way()
        text = str(raised.value)
        assert row.name in text
        assert row.purpose in text
        assert "memopt supports torch 2.11 to" in text


def _enter(context: contextlib.AbstractContextManager[None]) -> None:
    with context:
        pytest.fail("entered without the name")


@pytest.mark.parametrize("row", DEGRADED, ids=named)
def test_a_warning_says_once_what_happens_and_a_counter_how_often(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, row.name)
    if not access.expected(row):
        assert access.optional(row.name) is None
        return
    with pytest.warns(UserWarning, match="no torch") as warned:
        assert access.optional(row.name) is None
    (text,) = (str(one.message) for one in warned)
    assert row.name in text
    assert row.instead in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert access.optional(row.name) is None
    assert {row.name: 2} == access.DEGRADED


def test_what_another_version_has_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.autograd.Function.boxed_grads_call"
    hide(monkeypatch, name)
    of_another_torch(monkeypatch, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert access.optional(name) is None
    assert not access.known(name)
    assert not access.DEGRADED


def test_a_patch_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch._dynamo.reset
    with contextlib.suppress(ZeroDivisionError), access.patched("torch._dynamo.reset", print):
        assert torch._dynamo.reset is print
        raise ZeroDivisionError
    assert torch._dynamo.reset is original
    monkeypatch.setattr(torch._dynamo, "reset", original)
    access.replace("torch._dynamo.reset", print)
    assert torch._dynamo.reset is print


# What memopt does without what it can miss.


def _compiled_joint() -> None:
    model = nn.Linear(2, 2)
    capture(model, to_call(torch.ones(3, 2)))


def _no_timeout() -> None:
    assert timeout_of(object()) is None


def _note() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))])
    modules.note_step(optimizer)
    assert "_opt_called" not in vars(optimizer)


def _uncopied() -> None:
    with real_values_uncopied():
        pass


def _described() -> None:
    with aot.values_described_once():
        pass


def _compared() -> None:
    with dynamo.shapes_compared_if(lambda: False):
        pass


def _traced_one_by_one() -> None:
    with dynamo.failing_modules_heard() as names:
        assert names == []


def _late_tangents() -> None:
    assert not modes.backward_owns_tangents()


def _called_as_it_is() -> None:
    assert inductor.inside_of(SimpleNamespace(current_callable=print)) is None


def _unordered() -> None:
    assert not modes.accumulate_in_order([torch.ones((), requires_grad=True)])


GONE: dict[str, Callable[[], None]] = {
    "torch.optim.Optimizer._opt_called": _note,
    "torch.autograd.Function.boxed_grads_call": _late_tangents,
    "torch.autograd.graph.Node._set_sequence_nr": _unordered,
    "torch.distributed.ProcessGroup._get_backend": _no_timeout,
    "torch.distributed.ProcessGroup._device_types": _no_timeout,
    "torch._C._distributed_c10d.Backend.Options._timeout": _no_timeout,
    "torch._dynamo.functional_export._suggest_or_raise_constraint_violation": _compared,
    "torch._dynamo.variables.builder._clone_input": _uncopied,
    "torch._dynamo.variables.nn_module.record_nn_module_stack": _traced_one_by_one,
    "torch._dynamo.variables.tensor.get_real_value": _uncopied,
    "torch._functorch._aot_autograd.schemas.AOTConfig.enable_log": _compiled_joint,
    "torch.fx.experimental.proxy_tensor._extract_tensor_metadata": _described,
    "torch._inductor.output_code.CompiledFxGraph.current_callable": _called_as_it_is,
}


def test_each_degradation_is_tried() -> None:
    assert GONE.keys() == {row.name for row in DEGRADED}


@pytest.mark.parametrize("name", GONE)
def test_memopt_goes_on_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, name)
    if version() not in TABLE[name].versions:  # it has nothing to miss
        GONE[name]()
        assert not access.DEGRADED
        return
    assert access.expected(TABLE[name])
    with pytest.warns(UserWarning, match="no torch"):
        GONE[name]()
    assert access.DEGRADED[name]


@pytest.mark.parametrize(
    "name",
    [
        "torch._dynamo.config.enable_dynamo_decompositions",
        "torch._dynamo.functional_export._compiling_state_context",
        "torch._dynamo.functional_export.fullgraph_capture",
        "torch._dynamo.guards._get_closure_vars",
        "torch._dynamo.side_effects.SideEffects._get_modified_vars",
        "torch._dynamo.variables.SetVariable",
        "torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable._call_function",
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
        "torch._functorch._aot_autograd.utils._boxed_call",
        "torch._functorch._aot_autograd.schemas.AOTState.fw_metadata",
        "torch._functorch.config.backward_pass_autocast",
        "torch._mirror_autograd_meta_to",
        "torch.ops.aten.upsample_nearest1d.vec",
    ],
)
def test_no_model_is_captured_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These decide bits: without them another graph would be traced, and nobody would know."""
    hide(monkeypatch, name)
    with pytest.raises(CaptureError, match=name.replace(".", r"\.")):
        capture(nn.Linear(2, 2), to_call(torch.ones(3, 2)))


def test_a_handler_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = access.private(dynamo._HANDLERS)()
    monkeypatch.delitem(handlers, torch.compiler.is_compiling)
    with pytest.raises(CaptureError, match="_get_handlers"):
        capture(nn.Linear(2, 2), to_call(torch.ones(3, 2)))


def imported_names() -> Iterator[tuple[str, str]]:
    """The rows that a module of the room asks for by their names when it is imported."""
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) in CHECKS:
                    for argument in node.args:
                        if isinstance(argument, ast.Constant):
                            yield path.stem, argument.value


CHECKS = ("attribute", "attribute_name", "private", "required")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it is imported once more
@pytest.mark.parametrize(("module", "name"), dict.fromkeys(imported_names()))
def test_an_import_without_it_names_it(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, name)
    with pytest.raises(CaptureError, match=name.replace(".", r"\.")):
        runpy.run_module(f"memopt.torch_private.{module}")
