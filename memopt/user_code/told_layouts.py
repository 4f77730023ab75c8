"""Fake kernels for operators that have none: an operator runs once on stand-ins, which tells the
layouts of its results.

memopt cannot see what such an operator's code draws, and so runs it once in a step, in the
forward's order, as it does opaque functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from memopt.errors import CaptureError, led_to
from memopt.step.operators import RUN_ONCE
from memopt.torch_private import pytree
from memopt.torch_private.access import private
from memopt.torch_private.modes import dispatch_modes_off
from memopt.user_code.opaque import StridedLayout

_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\((?P<name>[\w:.]+)\)>")
_LIBRARIES: dict[str, Any] = {}


def operator_without_fake(error: BaseException, before: BaseException | None) -> str | None:
    """Return the name, "mine::scale", of the operator for whose lack of a fake kernel a trace
    failed; None: it failed for something else. The arguments are those of `led_to`."""
    unsupported = private("torch._subclasses.fake_tensor.UnsupportedOperatorException")
    for one in led_to(error, before):  # a refusal inside of a trace is a cause of its own cause
        if isinstance(one, unsupported):
            name = str(one.func.name()).partition(".")[0]
            return None if name.startswith(("aten::", "prims::")) else name
        found = _NO_FAKE.search(str(one))
        if found is not None:
            return found["name"]
    return None


def tell_layouts(name: str) -> bool:
    """Give an operator a fake kernel; return whether it had none from here before."""
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short)
    overloads = [getattr(packet, one) for one in packet.overloads()]
    if RUN_ONCE.issuperset(overloads):
        return False
    library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))  # type: ignore[no-untyped-call]
    for overload in overloads:
        form = overload.name() if overload.name() != f"{name}.default" else name
        torch.library.register_fake(form, _described(name, overload), lib=library)
        has_side_effect(overload)
    RUN_ONCE.update(overloads)
    return True


def is_python(overload: Any) -> bool:
    """Return whether a kernel of an operator, beside its fake and autograd's, is Python's code."""
    begin = str(overload.name()).removesuffix(".default").replace("::", "/") + "/"
    known = private("torch.library._impls")
    keys = (one.removeprefix(begin) for one in known if one.startswith(begin))
    return any(not key.startswith(("Autograd", "ADInplace", "Meta")) for key in keys)


def _described(name: str, overload: Any) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def described(*args: Any, **kwargs: Any) -> Any:
        leaves, nest = pytree.tree_flatten((args, kwargs))
        given = [StridedLayout.of(one) if isinstance(one, Tensor) else one for one in leaves]
        key = repr(given)
        if key not in known:
            known[key] = _layouts(name, overload, given, nest)
        results, form = known[key]
        made = [one.empty() if isinstance(one, StridedLayout) else one for one in results]
        return pytree.tree_unflatten(made, form)

    return described


def _layouts(name: str, overload: Any, given: list[Any], nest: Any) -> tuple[list[Any], Any]:
    """Run an operator on zeros and on ones; return its results, with layouts for tensors, and how
    they nest.

    Raises:
        CaptureError: it cannot run so, or its results' layouts depend on values.
    """
    remedy = f'give it a fake kernel: torch.library.register_fake("{name}", ...)'
    found, failed = [], None
    for number in (0, 1):
        try:
            found.append(_ran(overload, given, nest, number))
        except Exception as error:  # noqa: BLE001 - the user's code
            failed = error
    if not found:
        raise CaptureError(
            f"the operator {name} has no fake kernel, and cannot be run on zeros to learn what it "
            f"returns ({type(failed).__name__}: {failed}): {remedy}"
        ) from failed
    if any(one != found[0] for one in found):
        raise CaptureError(
            f"the operator {name} has no fake kernel, and the sizes of its results depend on "
            "values, which no plan can hold: return tensors of the same sizes in every step, or "
            "compute with them inside of the operator"
        )
    return found[0]


def _ran(overload: Any, given: list[Any], nest: Any, number: int) -> tuple[list[Any], Any]:
    devices = {one.device for one in given if isinstance(one, StridedLayout)}
    drawn_on = [one for one in devices if one.type == "cuda"]
    with dispatch_modes_off(), torch.no_grad(), torch.random.fork_rng(drawn_on):
        leaves = [
            one.empty().fill_(number) if isinstance(one, StridedLayout) else one for one in given
        ]
        args, kwargs = pytree.tree_unflatten(leaves, nest)
        results, form = pytree.tree_flatten(overload(*args, **kwargs))
        return [StridedLayout.of(x) if isinstance(x, Tensor) else x for x in results], form
