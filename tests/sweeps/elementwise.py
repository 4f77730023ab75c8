"""Operators that work element by element."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.sweeps.subjects import Entry, Table

_REAL = (
    "abs neg sin cos tan sinh cosh tanh asinh atan exp exp2 expm1 sigmoid erf erfc relu relu6 "
    "square sign floor ceil round trunc frac softplus selu celu elu silu mish gelu hardtanh "
    "hardswish hardsigmoid hardshrink softshrink tanhshrink softsign logsigmoid leaky_relu "
    "positive sgn rad2deg deg2rad sinc nan_to_num relu_twice i0"
)  # fmt: skip
_POSITIVE = "log log2 log10 log1p sqrt rsqrt reciprocal digamma lgamma polygamma1"
_UNIT = "logit asin acos atanh erfinv ndtri log_ndtr xlog1py_self entr"
_SPECIAL = "i0e i1 i1e ndtr erfcx expit"


def _unary(name: str, domain: str) -> Entry:
    if name == "relu_twice":
        return Entry(lambda h, g, k: h.relu().relu(), domain=domain)
    if name == "polygamma1":
        return Entry(lambda h, g, k: torch.polygamma(1, h), domain=domain)
    if name == "xlog1py_self":
        return Entry(lambda h, g, k: torch.special.xlog1py(h, g), domain=domain)
    home = next(home for home in (torch, F, torch.special) if hasattr(home, name))
    function = getattr(home, name)
    return Entry(lambda h, g, k: function(h), domain=domain)


UNARY: Table = {
    **{name: _unary(name, "real") for name in _REAL.split()},
    **{name: _unary(name, "positive") for name in _POSITIVE.split()},
    **{name: _unary(name, "unit") for name in _UNIT.split()},
    **{f"special.{n}": _unary(n, "real") for n in _SPECIAL.split()},
    "acosh": Entry(lambda h, g, k: h.acosh(), domain="above one"),
    "gelu tanh": Entry(lambda h, g, k: F.gelu(h, approximate="tanh")),
    "elu 0.5": Entry(lambda h, g, k: F.elu(h, 0.5)),
    "celu 0.5": Entry(lambda h, g, k: F.celu(h, 0.5)),
    "softplus 2": Entry(lambda h, g, k: F.softplus(h, 2.0, 1.0)),
    "hardtanh 0.3": Entry(lambda h, g, k: F.hardtanh(h, -0.3, 0.4)),
    "threshold": Entry(lambda h, g, k: F.threshold(h, 0.1, 0.2)),
    "leaky_relu 0.3": Entry(lambda h, g, k: F.leaky_relu(h, 0.3)),
    "rrelu eval": Entry(lambda h, g, k: F.rrelu(h, training=False)),
    "hardshrink 0.2": Entry(lambda h, g, k: F.hardshrink(h, 0.2)),
    "softshrink 0.2": Entry(lambda h, g, k: F.softshrink(h, 0.2)),
    "prelu": Entry(lambda h, g, k: F.prelu(h, k.param("w", 4))),
    "prelu one": Entry(lambda h, g, k: F.prelu(h, k.param("w", 1))),
    "glu": Entry(lambda h, g, k: F.glu(h, -1)),
    "glu 1": Entry(lambda h, g, k: F.glu(h, 1)),
    "softmax": Entry(lambda h, g, k: h.softmax(-1)),
    "softmax 1": Entry(lambda h, g, k: h.softmax(1)),
    "log_softmax": Entry(lambda h, g, k: h.log_softmax(-1)),
    "log_softmax 0": Entry(lambda h, g, k: h.log_softmax(0)),
    "softmin": Entry(lambda h, g, k: F.softmin(h, 2)),
    "gumbel-free hard": Entry(lambda h, g, k: F.one_hot(h.argmax(-1), 6).float() * h),
    "clamp": Entry(lambda h, g, k: h.clamp(-0.3, 0.7)),
    "clamp min": Entry(lambda h, g, k: h.clamp(min=0.1)),
    "clamp max": Entry(lambda h, g, k: h.clamp(max=0.1)),
    "clamp tensors": Entry(lambda h, g, k: torch.clamp(h, g - 1, g + 1)),
    "pow 2": Entry(lambda h, g, k: h**2),
    "pow 3": Entry(lambda h, g, k: h**3),
    "pow 0.5": Entry(lambda h, g, k: h**0.5, domain="positive"),
    "pow 1.7": Entry(lambda h, g, k: h**1.7, domain="positive"),
    "pow -1": Entry(lambda h, g, k: h**-1, domain="positive"),
    "pow tensor": Entry(lambda h, g, k: h**g, domain="positive"),
    "2 pow": Entry(lambda h, g, k: 2.0**h),
    "float_power": Entry(lambda h, g, k: h.float_power(2)),
    "to double": Entry(lambda h, g, k: h.double().sin()),
    "to bfloat16": Entry(lambda h, g, k: h.bfloat16().sin()),
    "to half": Entry(lambda h, g, k: h.half() * 2),
    "to int": Entry(lambda h, g, k: (h, (h * 3).int())),
    "bfloat16 gelu": Entry(lambda h, g, k: F.gelu(h.bfloat16()).float()),
    "bfloat16 softplus": Entry(lambda h, g, k: F.softplus(h.bfloat16()).float()),
    "double sigmoid": Entry(lambda h, g, k: h.double().sigmoid()),
    "clone": Entry(lambda h, g, k: h.clone() * 2),
    "contiguous": Entry(lambda h, g, k: h.contiguous() * 2),
    "detach": Entry(lambda h, g, k: h * h.detach()),
    "mvlgamma": Entry(lambda h, g, k: torch.mvlgamma(h + 2, 2), domain="positive"),
    "frexp": Entry(lambda h, g, k: torch.frexp(h)[0]),
    "isfinite": Entry(lambda h, g, k: (h, h.isfinite(), h.isnan(), h.signbit())),
    "logical_not": Entry(lambda h, g, k: (h, (h > 0).logical_not())),
}

_BINARY = (
    "add sub mul div maximum minimum fmax fmin atan2 hypot logaddexp logaddexp2 copysign "
    "nextafter heaviside_like fmod_like dist true_divide"
)  # fmt: skip


def _binary(name: str) -> Entry:
    if name == "heaviside_like":
        return Entry(lambda h, g, k: (h, torch.heaviside(h.detach(), g.detach())))
    if name == "fmod_like":
        return Entry(lambda h, g, k: torch.fmod(h, g.detach() + 3))
    if name == "nextafter":
        return Entry(lambda h, g, k: h * torch.nextafter(h.detach(), g.detach()))
    function = getattr(torch, name)
    return Entry(lambda h, g, k: function(h, g))


BINARY: Table = {
    **{name: _binary(name) for name in _BINARY.split()},
    "div floor": Entry(lambda h, g, k: (h, torch.div(h, g, rounding_mode="floor"))),
    "div trunc": Entry(lambda h, g, k: (h, torch.div(h, g, rounding_mode="trunc"))),
    "remainder": Entry(lambda h, g, k: torch.remainder(h, g.detach() + 3)),
    "add alpha": Entry(lambda h, g, k: torch.add(h, g, alpha=0.3)),
    "sub alpha": Entry(lambda h, g, k: torch.sub(h, g, alpha=0.3)),
    "rsub": Entry(lambda h, g, k: 1.5 - h),
    "rdiv": Entry(lambda h, g, k: 1.5 / h, domain="positive"),
    "add number": Entry(lambda h, g, k: h + 0.7),
    "mul number": Entry(lambda h, g, k: h * 0.7),
    "div number": Entry(lambda h, g, k: h / 0.7),
    "add broadcast": Entry(lambda h, g, k: h + g[:1, :, :1]),
    "mul broadcast": Entry(lambda h, g, k: h * g.sum(-1, keepdim=True)),
    "mul parameter": Entry(lambda h, g, k: h * k.param("w", 6)),
    "add channel": Entry(lambda h, g, k: h + k.param("w", 4, 1, 1)),
    "maximum number": Entry(lambda h, g, k: torch.maximum(h, torch.tensor(0.2))),
    "maximum self": Entry(lambda h, g, k: torch.maximum(h, h.detach())),
    "addcmul": Entry(lambda h, g, k: torch.addcmul(h, g, h, value=0.3)),
    "addcdiv": Entry(lambda h, g, k: torch.addcdiv(h, g, h, value=0.3), domain="positive"),
    "lerp": Entry(lambda h, g, k: torch.lerp(h, g, 0.3)),
    "lerp tensor": Entry(lambda h, g, k: torch.lerp(h, g, g), domain="unit"),
    "where": Entry(lambda h, g, k: torch.where(h > g, h, g)),
    "where number": Entry(lambda h, g, k: torch.where(h > 0, h, 0.1)),
    "masked_fill": Entry(lambda h, g, k: h.masked_fill(k.bools("m", 5, 6), 0.3)),
    "masked_fill tensor": Entry(lambda h, g, k: h.masked_fill(g > 0, h.detach().mean())),
    "xlogy": Entry(lambda h, g, k: torch.xlogy(h, g), domain="positive"),
    "ldexp": Entry(lambda h, g, k: torch.ldexp(h, k.ints("e", 4, 6))),
    "gcd-like compare": Entry(lambda h, g, k: (h, h.eq(g), h.lt(g), h.ge(g))),
    "bitwise": Entry(lambda h, g, k: (h, (h > 0) & (g > 0), (h > 0) ^ (g > 0))),
    "isclose": Entry(lambda h, g, k: (h, torch.isclose(h, g))),
    "complex": Entry(lambda h, g, k: torch.complex(h.contiguous(), g.contiguous())),
    "polar": Entry(lambda h, g, k: torch.polar(h, g)),
    "complex mul": Entry(lambda h, g, k: torch.complex(h, g) * torch.complex(g, h)),
    "complex abs": Entry(lambda h, g, k: torch.complex(h, g).abs()),
    "complex angle": Entry(lambda h, g, k: torch.complex(h, g).angle()),
    "complex conj": Entry(lambda h, g, k: torch.complex(h, g).conj() * 2),
    "addition chain": Entry(lambda h, g, k: (h + g) * h + g),
    "swiglu": Entry(lambda h, g, k: F.silu(h) * g),
    "gate": Entry(lambda h, g, k: h.sigmoid() * g.tanh()),
    "mixed dtypes": Entry(lambda h, g, k: h * g.double()),
}

_IN_PLACE = (
    "relu_ sigmoid_ tanh_ exp_ neg_ abs_ sin_ cos_ square_ erf_ floor_ clamp_ hardtanh_ elu_ "
    "leaky_relu_ selu_ celu_ relu6_ silu_ mish_ hardswish_ hardsigmoid_ add_ sub_ mul_ div_ "
    "softplus_none addcmul_ lerp_ masked_fill_ fill_ zero_ clamp_min_ threshold_ pow_ sqrt_ "
    "reciprocal_ index_add_ scatter_add_ index_copy_ index_fill_ copy_ setitem "
    "setitem_mask setitem_row transpose_add baddbmm_ cumsum_ "
)  # fmt: skip


def _in_place(name: str, h, g, k):  # type: ignore[no-untyped-def]  # a table's row
    y = h * 1.5
    match name:
        case "hardtanh_" | "elu_" | "leaky_relu_" | "selu_" | "celu_" | "relu6_":
            base = name[:-1]
            return getattr(F, base)(y, inplace=True)
        case "silu_" | "mish_" | "hardswish_" | "hardsigmoid_" | "threshold_":
            base = name[:-1]
            more = (0.1, 0.2) if base == "threshold" else ()
            return getattr(F, base)(y, *more, inplace=True)
        case "softplus_none":
            return F.softplus(y).mul_(g)
        case "clamp_":
            return y.clamp_(-0.5, 0.5)
        case "clamp_min_":
            return y.clamp_min_(0.1)
        case "add_" | "sub_" | "mul_":
            return getattr(y, name)(g)
        case "div_":
            return y.div_(g.abs() + 1)
        case "addcmul_":
            return y.addcmul_(g, h, value=0.2)
        case "lerp_":
            return y.lerp_(g, 0.2)
        case "masked_fill_":
            return y.masked_fill_(g > 0, 0.3)
        case "fill_":
            y[..., 0].fill_(0.3)
            return y
        case "pow_":
            return y.pow_(2)
        case "sqrt_":
            return y.abs_().add_(1).sqrt_()
        case "reciprocal_":
            return y.abs_().add_(1).reciprocal_()
        case "index_add_":
            return y.index_add_(1, k.ints("i", 4, 3), g[:, :3])
        case "scatter_add_":
            return y.scatter_add_(-1, k.ints("i", 6, 2, 4, 5, 6), g)
        case "index_copy_":
            return y.index_copy_(1, torch.tensor([2, 0]), g[:, :2])
        case "index_fill_":
            return y.index_fill_(1, torch.tensor([2, 0]), 0.5)
        case "copy_":
            y[:, 1:3].copy_(g[:, 1:3])
            return y
        case "setitem":
            y[:, 1] = g[:, 2]
            return y
        case "setitem_mask":
            y[k.bools("m", 2, 4, 5, 6)] = 0.25
            return y
        case "setitem_row":
            y[0, :, 1:4, ::2] = 0.5
            return y
        case "transpose_add":
            y.transpose(0, 1).add_(g.transpose(0, 1))
            return y
        case "baddbmm_":
            return y.flatten(0, 1).baddbmm_(g.flatten(0, 1), k.param("w", 8, 6, 6))
        case "cumsum_":
            return y.cumsum_(-1)
        case _:
            return getattr(y, name)()


def _row(name: str) -> Entry:
    return Entry(lambda h, g, k: _in_place(name, h, g, k))


IN_PLACE: Table = {name: _row(name) for name in _IN_PLACE.split()}

TABLE: Table = {**UNARY, **BINARY, **IN_PLACE}
