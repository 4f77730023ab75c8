"""Leaves out outputs that a planned step need not return, because its loss does not read them.

A Hugging Face model that is given `labels` returns its loss and its logits. A loop that trains with
the loss never reads the logits; a step that need not return them can free them after their last
use, and never needs them whole. Their stand-in raises an error when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch

from memopt.errors import NotReturnedError
from memopt.torch_private import pytree


class NotReturned:
    """Stands for an output that was not returned: any use raises NotReturnedError.

    Args:
        position: the leaf of the output that it stands for.
        on_use: called with that position before the error is raised.
    """

    def __init__(self, position: int, on_use: Callable[[int], object] | None = None) -> None:
        self.__dict__.update(_position=position, _on_use=on_use)

    def __repr__(self) -> str:
        return f"<output {self.__dict__.get('_position')} was not returned>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        state = self.__dict__
        if state.get("_on_use") is not None:
            state["_on_use"](state["_position"])
        raise NotReturnedError(
            f"output {state.get('_position')} of the planned model was not returned: it was "
            'planned with returns="loss", and the loss does not read it. To read it in training, '
            'plan with returns="all"; in eval mode and under torch.no_grad() everything is returned'
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, cls):
                leaf._refuse()
        raise NotReturnedError(
            "an output of the planned model was used that was not returned, since it was planned "
            'with returns="loss": plan with returns="all"'
        )

    __getattr__ = __setattr__ = __getitem__ = __setitem__ = __len__ = __iter__ = _refuse
    __bool__ = __float__ = __int__ = __index__ = __array__ = __call__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = __invert__ = _refuse
    __hash__ = object.__hash__


def without(output: Any, dropped: Collection[int]) -> Any:
    """Return an output whose leaves at these positions are NotReturned."""
    if not dropped:
        return output
    leaves, spec = pytree.tree_flatten(output)
    for position in dropped:
        leaves[position] = NotReturned(position)
    return pytree.tree_unflatten(leaves, spec)


_OTHER_VALUE = (
    'returns="loss": loss_fn gives another value without the outputs that it does not read '
    '(it asks what they are, or keeps a state of its own); plan with returns="all"'
)


def unread(
    loss: Callable[[Any], Any],
    leaves: Sequence[Any],
    spec: pytree.TreeSpec,
    useful: Collection[int],
    same: Callable[[Any, Any], bool] | None = None,
) -> tuple[int, ...]:
    """Return the positions of an output's tensors that a loss does not read.

    Args:
        loss: a function of the output; called several times.
        leaves: the leaves of an output.
        spec: the output's structure.
        useful: positions of the leaves that get gradients from the loss.
        same: says whether two values of the loss are the same; None: they are not compared.

    Raises:
        ValueError: the loss's value depends on leaves that it does not read.
    """
    dropped = {
        i for i, one in enumerate(leaves) if isinstance(one, torch.Tensor) and i not in useful
    }
    before = loss(pytree.tree_unflatten(list(leaves), spec)) if dropped and same else None
    while dropped:
        read: set[int] = set()
        given = [NotReturned(i, read.add) if i in dropped else one for i, one in enumerate(leaves)]
        value = None
        try:
            value = loss(pytree.tree_unflatten(given, spec))
        except NotReturnedError:
            pass
        except (TypeError, RuntimeError, ValueError):
            # An operator that takes only tensors.
            if not read:
                return ()
        if not read:
            if same is not None and not same(before, value):
                raise ValueError(_OTHER_VALUE)
            break
        # The same tensor elsewhere in the output counts as read.
        names = {id(leaves[i]) for i in read}
        dropped = {i for i in dropped if id(leaves[i]) not in names}
    return tuple(sorted(dropped))
