"""The functions of `torch.distributions.kl_divergence`, which Dynamo cannot look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memopt.torch_private.access import private
from memopt.torch_private.dynamo import handlers_replaced, taken_whole

_FIND = "torch.distributions.kl._dispatch_kl"
_FOUND = "torch.distributions.kl._KL_MEMOIZE"
_FUNCTION = "torch._dynamo.variables.UserFunctionVariable"
T = TypeVar("T")


def with_divergences(trace: Callable[[], T]) -> T:
    """Run `trace`; where it met divergences of kinds of distributions that torch has not met before
    (it keeps those that it has), run it again once they are looked up."""
    find, found = private(_FIND), private(_FOUND)
    met: list[Any] = []

    def handler(_variable: Any, _translator: Any, *kinds: Any) -> Any:
        one, other = (kind.realize().value for kind in kinds)
        found[one, other] = find(one, other)
        met.append(found[one, other])
        return private(_FUNCTION)(found[one, other])

    with taken_whole([find]), handlers_replaced({find: handler}):
        while True:
            met.clear()
            try:
                traced = trace()
            except Exception:
                if not met:
                    raise
            else:
                if not met:
                    return traced
