"""Elementwise operators, softmax and dropout whose backward needs other operands than ATen's: the
output in place of the input, the input in place of the output, or a bit for each element.

GELU, SiLU, Mish and hardswish are not one-to-one: their backward needs their input, and a plan
that saves little runs their forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.kernels.bits import masks, pack, pack_where, packed_bytes, unpack
from memopt.kernels.kernel import Kernel, overwriting, with_twin
from memopt.kernels.site import Sites, contiguous, storage_bytes, value_of
from memopt.step.dropout import dropout
from memopt.torch_private.operators import aten as ATEN
from memopt.torch_private.operators import schema_of


def _with_bits(name: str, run: Any, over: Any, test: Callable[..., Tensor]) -> Kernel:
    """Make a kernel that also returns a bit per element of its result: whether it passes `test`."""

    def keeping(run: Callable[..., Tensor]) -> Callable[..., Any]:
        def kept(x: Tensor, *options: float) -> tuple[Tensor, Tensor]:
            y = run(x, *options)
            return y, pack_where(y, lambda part: test(part, *options))

        return kept

    return with_twin(name, keeping(run), keeping(over))


def _inside(y: Tensor, low: float = -1.0, high: float = 1.0) -> Tensor:
    return ((y <= low) | (y >= high)).logical_not_()


def _masked_over(g: Tensor, bits: Tensor, *_: Any) -> Tensor:
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        flat[place].masked_fill_(mask.logical_not_(), 0)
    return g


def _scaled_over(g: Tensor, bits: Tensor, slope: float) -> Tensor:
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        part = flat[place]
        torch.where(mask, part, part * slope, out=part)
    return g


def _gradient(name: str, run: Callable[..., Any]) -> Kernel:
    """Wrap an ATen backward whose `grad_input` overload can write over its first argument."""
    return with_twin(name, run, lambda g, *rest: run(g, *rest, grad_input=g))


def _elu(g: Tensor, y: Tensor, alpha: float, scale: float, inside: float) -> Any:
    return ATEN.elu_backward(g, alpha, scale, inside, True, y)


def _softplus(g: Tensor, y: Tensor, beta: float, threshold: float) -> Tensor:
    # dy/dx = 1 − exp(−βy); above the threshold y = x, and ATen's slope is 1.
    slope = torch.expm1(-beta * y).neg_()
    return torch.where(y * beta > threshold, g, slope.mul_(g))


def _hardsigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return ATEN.hardsigmoid(x), pack((x > -3) & (x < 3))


def _hardsigmoid_masked(g: Tensor, bits: Tensor) -> Any:
    # ATen's own kernel, with an input inside or outside of the sloped range.
    inside = torch.where(unpack(bits, g.shape), g.new_zeros(()), 9.0)
    return ATEN.hardsigmoid_backward(g, inside.to(g.dtype))


def _softmax_again(forward: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(g: Tensor, x: Tensor, dim: int, option: Any) -> Any:
        return ATEN._softmax_backward_data(g, forward(x, dim, option), dim, x.dtype)

    return run


def _dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    y, mask = dropout(x, p, train)
    return y, pack(mask)


def _dropout_backward(g: Tensor, bits: Tensor, scale: float) -> Any:
    if not g.is_contiguous():
        return ATEN.native_dropout_backward(g, unpack(bits, g.shape), scale)
    return _dropout_backward_over(g.clone(), bits, scale)


def _dropout_backward_over(g: Tensor, bits: Tensor, scale: float) -> Tensor:
    if not g.is_contiguous():
        return g.copy_(ATEN.native_dropout_backward(g, unpack(bits, g.shape), scale))
    flat = g.view(-1)
    for place, mask in masks(bits, g.numel()):
        flat[place] = ATEN.native_dropout_backward(flat[place], mask, scale)
    return g


# A NaN passes its gradient on, as in threshold_backward: not (y <= 0).
RELU = _with_bits("relu.bitmask.2", ATEN.relu, ATEN.relu_, lambda y, *_: (y <= 0).logical_not_())
HARDTANH = _with_bits("hardtanh.bitmask.2", ATEN.hardtanh, ATEN.hardtanh_, _inside)
# Where the input is above 0, the output is: the slope is positive.
LEAKY = _with_bits("leaky_relu.bitmask.2", ATEN.leaky_relu, ATEN.leaky_relu_, lambda y, *_: y > 0)
MASKED = overwriting("masked_gradient.bitmask.2", _masked_over)
SCALED = overwriting("scaled_gradient.bitmask.2", _scaled_over)
HARDTANH_OUTPUT = _gradient("hardtanh_backward.output", ATEN.hardtanh_backward)
LEAKY_OUTPUT = _gradient(
    "leaky_relu_backward.output",
    lambda g, y, slope, **out: ATEN.leaky_relu_backward(g, y, slope, True, **out),
)
RELU_INPUT = _gradient(
    "relu_backward.input", lambda g, x, **out: ATEN.threshold_backward(g, x, 0, **out)
)
ELU = Kernel("elu_backward.output", _elu)
SOFTPLUS = Kernel("softplus_backward.output", _softplus)
HARDSIGMOID = Kernel("hardsigmoid.bitmask", _hardsigmoid)
HARDSIGMOID_MASKED = Kernel("hardsigmoid_backward.bitmask", _hardsigmoid_masked)
DROPOUT = Kernel("dropout.bitmask.2", _dropout)
DROPOUT_BACKWARD = with_twin(
    "dropout_backward.bitmask.2", _dropout_backward, _dropout_backward_over
)


@dataclass(frozen=True)
class Saving:
    """An operand that an operator's backward may read in place of ATen's.

    Attributes:
        forward, backward: "aten.<these>.default".
        reads: "input" or "output": the operand that it may read; ATen's reads the other.
        kernel: the backward of (gradient, that operand, the forward's options); None: only the
            backward that reads bits exists.
        bits: (the forward that also makes a bit per element, the backward that reads those).
        bits_scratch: the scratch memory of those two, of (elements, bytes of the output).
        outputs: how many tensors as large as the output `kernel` makes.
        again: whether it runs the forward again.
        exact: whether it gives the same bits.
        position: of the operand among the arguments of ATen's backward.
        fits: whether the arguments of ATen's backward allow it.
    """

    forward: str
    backward: str
    reads: str
    kernel: Kernel | None
    bits: tuple[Kernel, Kernel] | None = None
    bits_scratch: Callable[[int, int], tuple[int, int]] = lambda elements, _: (
        # Comparisons of an eighth of the elements, and their shifted bits.
        3 * packed_bytes(elements),
        2 * packed_bytes(elements),
    )
    outputs: int = 0
    again: bool = False
    exact: bool = True
    position: int = 1
    fits: Callable[[dict[str, Any]], bool] = lambda _: True


def _recomputing(forward: str, backward: str, kernel: Callable[..., Any]) -> Saving:
    """Make a backward that recomputes the output, by the same kernel, in scratch memory."""
    known = Kernel(f"{forward}_backward.input", kernel)
    return Saving(forward, backward, "input", known, outputs=1, again=True)


CLIPPED = (
    Saving("relu", "threshold_backward", "input", RELU_INPUT, (RELU, MASKED),
           fits=lambda given: given["threshold"] == 0),
    Saving("hardtanh", "hardtanh_backward", "output", HARDTANH_OUTPUT, (HARDTANH, MASKED)),
    Saving("leaky_relu", "leaky_relu_backward", "output", LEAKY_OUTPUT, (LEAKY, SCALED),
           lambda n, size: (3 * packed_bytes(n), 2 * packed_bytes(n) + -(-size // 8)),
           fits=lambda given: given["negative_slope"] > 0 and not given["self_is_result"]),
)  # fmt: skip
"""ReLU and similar operators (MONeT §3)."""

SMOOTH = (
    # With a negative alpha an output can have two inputs.
    Saving("elu", "elu_backward", "output", ELU, exact=False, position=5,
           fits=lambda given: given["alpha"] > 0 and not given["is_result"]),
    Saving("softplus", "softplus_backward", "output", SOFTPLUS, outputs=3, exact=False),
    Saving("hardsigmoid", "hardsigmoid_backward", "output", None,
           (HARDSIGMOID, HARDSIGMOID_MASKED), lambda n, size: (3 * n, n + 2 * size)),
)  # fmt: skip
"""ELU (CELU and SELU, too), softplus and hardsigmoid: one-to-one where their slope is not 0."""

ACTIVATIONS = (
    _recomputing("tanh", "tanh_backward", lambda g, x: ATEN.tanh_backward(g, ATEN.tanh(x))),
    _recomputing(
        "sigmoid", "sigmoid_backward", lambda g, x: ATEN.sigmoid_backward(g, ATEN.sigmoid(x))
    ),
    _recomputing("_softmax", "_softmax_backward_data", _softmax_again(ATEN._softmax)),
    _recomputing("_safe_softmax", "_softmax_backward_data", _softmax_again(ATEN._safe_softmax)),
)


def _arguments(call: Node) -> dict[str, Any]:
    """Return a call's arguments by name, defaults included."""
    schema = schema_of(call.target).arguments
    names = [argument.name for argument in schema]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return {one.name: given.get(one.name, one.default_value) for one in schema}


def _options(call: Node) -> dict[str, Any]:
    """Return the arguments of an elementwise call beside its tensor."""
    return {name: value for name, value in _arguments(call).items() if name != "self"}


def _original(x: Any) -> Any:
    """Return the source of a copy: an in-place hardtanh's backward reads a copy of its input, which
    the alternatives do not need."""
    while isinstance(x, Node) and str(x.target) == "aten.clone.default":
        x = x.args[0]
    return x


def _forward_of(sites: Sites, row: Saving, backward: Node) -> Node | None:
    """Return the forward of a backward: the producer of its operand, or the first reader of it with
    the same options."""
    target, operand = f"aten.{row.forward}.default", backward.args[row.position]
    if row.reads == "input":
        return sites.producer(operand, target)
    given = _arguments(backward).items()
    for forward in sites.calls(target):
        same = _original(forward.args[0]) is _original(operand)
        if same and _options(forward).items() <= given:
            return forward
    return None


def attach_savings(rows: Iterable[Saving], sites: Sites) -> None:
    """Attach the alternatives of all rows."""
    for row in rows:
        bits: dict[Node, Node] = {}
        for backward in sites.calls(f"aten.{row.backward}.default"):
            forward = _forward_of(sites, row, backward)
            if forward is None or not row.fits(_arguments(backward)):
                continue
            # Kernels over flat tensors need contiguous arguments and give contiguous results.
            if row.again or contiguous(backward, backward.args[0], forward):
                _attach_saving(sites, row, forward, backward, bits)


def _attach_saving(
    sites: Sites, row: Saving, forward: Node, backward: Node, bits: dict[Node, Node]
) -> None:
    g, y = backward.args[0], value_of(forward)
    options = tuple(_options(forward).values())
    if row.bits is not None:
        kernels, scratch = row.bits, row.bits_scratch(y.numel(), storage_bytes(forward))
        if forward not in bits:
            bits[forward] = sites.bits(forward, y)
            results = (forward, bits[forward])
            sites.add(
                forward, "bitmask", kernels[0], forward.args, results, workspace_bytes=scratch[0]
            )
        given = (g, bits[forward], *options)
        sites.add(backward, "bitmask", kernels[1], given, workspace_bytes=scratch[1])
    if row.kernel is not None:
        sites.add(
            backward,
            row.reads,
            row.kernel,
            (g, forward.args[0] if row.reads == "input" else forward, *options),
            workspace_bytes=row.outputs * storage_bytes(forward),
            exact=row.exact,
            like=((forward, 1.0), (backward, 1.0)) if row.again else (),
        )


def attach_dropout(sites: Sites) -> None:
    """Attach a packed mask to `native_dropout` in training mode. Recomputing the mask needs no
    implementation: the operator runs again with only its mask kept (the executor restores the
    random state)."""
    pairs = sites.pairs("aten.native_dropout_backward.default", 1, "aten.native_dropout.default")
    for forward, backward in pairs:
        g, _, scale = backward.args
        result, held = sites.result(forward, 0), value_of(forward)[1]
        if result is None or not held.is_contiguous():
            continue
        bits, size, result_bytes = sites.bits(forward, held), held.numel(), storage_bytes(result)
        results, scratch = (result, bits), result_bytes + size
        sites.add(
            forward, "bitmask", DROPOUT, forward.args, results, workspace_bytes=scratch, draws=True
        )
        if contiguous(g):
            # An eighth at a time.
            scratch = (result_bytes + 2 * size) // 8
        sites.add(backward, "bitmask", DROPOUT_BACKWARD, (g, bits, scale), workspace_bytes=scratch)
