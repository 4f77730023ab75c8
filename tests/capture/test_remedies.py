"""Why a forward cannot be captured: each cause is named as what it is, and its remedy works."""

from __future__ import annotations

import logging
import random
import warnings
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.capture.capture import capture
from memopt.capture.remedies import known_remedy
from memopt.capture.uncaptured import first_line
from memopt.errors import CaptureError
from memopt.step.inputs import to_call
from tests.capture.forms import (
    CAUSAL,
    GENERATOR,
    NOTHING,
    Form,
    Net,
    causal,
    copied,
    enlarged,
    into_another_order,
    missing,
)


class Row(NamedTuple):
    """A form, what is said of it, and what it is to be written as."""

    form: Form
    message: str
    remedied: tuple[Form, ...] = ()


GENERATORS = (lambda m, x: x + torch.randn(x.shape),)
DRAWN: tuple[Form, ...] = (
    lambda m, x: x * torch.empty(()).uniform_(0.5, 1.5),
    lambda m, x: x * torch.randint(1, 4, ()),
    lambda m, x: torch.where(torch.rand(()) < 0.5, x * 2, x),
)
PYTHON = r"it draws random numbers in Python, .*uniform_\(a, b\)"
CHECKED = eval(compile("lambda m, x: x * (random.getrandbits(3) > 9)", "<@beartype(f)>", "eval"))
NUMPY = r"it draws or seeds random numbers in numpy, .*torch\.rand"
VALUES = r"without data-dependent Python control flow .*torch\.where"
SHAPES = r"a shape depends on the values of a tensor at .*torch\.where"
NUMBERS = r"reads a number out of a numpy array or a tensor, .*Python numbers .*register_buffer"
SIZES = r"reads a size or a factor out of a tensor .*a Python number"
PRINTS = "it prints, logs or warns, .*in the training loop"

ROWS: dict[str, Row] = {
    "own generator": Row(
        lambda m, x: x + torch.randn(x.shape, generator=GENERATOR),
        "it draws from a torch.Generator, .*without generator=",
        GENERATORS,
    ),
    "normal_": Row(
        lambda m, x: x + torch.empty_like(x).normal_(generator=GENERATOR),
        "it draws from a torch.Generator, .*without generator=",
        GENERATORS,
    ),
    "uniform": Row(lambda m, x: x * random.uniform(0.5, 1.5), PYTHON, DRAWN[:1]),
    "random": Row(lambda m, x: x * 2 if random.random() < 0.5 else x, PYTHON, DRAWN[2:]),
    "randint": Row(lambda m, x: x * random.randint(1, 3), PYTHON, DRAWN[1:2]),
    "choice": Row(lambda m, x: x * random.choice([1.0, 2.0]), PYTHON),
    "index": Row(lambda m, x: x * m.numbers[int(torch.rand(1).item() * 2)], VALUES),
    "own Random": Row(lambda m, x: x * m.random.random(), PYTHON),
    "seed": Row(lambda m, x: x * random.Random(torch.randint(9, ()).item()).random(), SIZES),
    "beartype": Row(CHECKED, "beartype draws random numbers .*BeartypeStrategy.O0"),
    "numpy": Row(lambda m, x: x * np.random.uniform(), NUMPY),
    "numpy array": Row(
        lambda m, x: x + torch.from_numpy(np.random.rand(3)).float(),
        NUMPY,
        (lambda m, x: x + torch.rand(3),),
    ),
    "numpy in a checkpoint": Row(
        lambda m, x: checkpoint(lambda y: y * np.random.uniform(), x, use_reentrant=False), NUMPY
    ),
    "numpy's seed": Row(lambda m, x: (np.random.seed(1), x)[1], NUMPY),
    "own numpy": Row(lambda m, x: x * m.drawn.random(), NUMPY),
    "table": Row(
        lambda m, x: x * float(m.table[0]),
        NUMBERS,
        (lambda m, x: x * m.numbers[0], lambda m, x: x * m.tables[0]),
    ),
    "returns a distribution": Row(
        lambda m, x: Normal(m.linear(x), 1.0, validate_args=False),
        "it returns a Normal, which is no container .*its parameters",
        (lambda m, x: (m.linear(x), 1.0),),
    ),
    "factor": Row(
        lambda m, x: enlarged(x, scale_factor=float(m.plain[0])),
        SIZES,
        (lambda m, x: enlarged(x, scale_factor=1.0),),
    ),
    "sizes": Row(
        lambda m, x: enlarged(x, size=tuple(m.tables.int() * 3)),
        SIZES,
        (lambda m, x: enlarged(x, size=(3, 3)),),
    ),
    "opaque": Row(
        lambda m, x: memopt.opaque(causal)(x) @ x,
        r"calls memopt\.opaque itself: .*outside of the forward",
        (lambda m, x: CAUSAL(x) @ x,),
    ),
    "out=": Row(
        into_another_order,
        r"writes to a tensor with gaps or in another order \(out=\)",
        (copied,),
    ),
    "Parameter": Row(
        lambda m, x: x * nn.Parameter(torch.ones(3)),
        "it makes an nn.Parameter: make it in __init__",
        (lambda m, x: x * m.scale, lambda m, x: x * torch.ones(3)),
    ),
    "requires_grad_": Row(
        lambda m, x: x.requires_grad_() * 2,
        r"it calls requires_grad_\(\): do that before the call",
        (lambda m, x: x * 2,),
    ),
    "made": Row(
        lambda m, x: (m.linear(x), torch.zeros_like(x).requires_grad_()),
        r"it calls requires_grad_\(\): .* or leave it out",
        (lambda m, x: m.linear(x) + torch.zeros_like(x),),
    ),
    "backward": Row(
        lambda m, x: (m.linear(x).sum().backward(), x)[1],
        r"the forward differentiates in a way that no graph holds \(backward.*torch\.func\.grad",
        (lambda m, x: torch.func.grad(lambda y: m.linear(y).square().sum())(x),),
    ),
    "slice": Row(
        lambda m, x: (m.linear(x), slice(0, 3), x.dtype),
        "it returns a slice beside its tensors.*numbers or a text",
        (lambda m, x: (m.linear(x), 0, 3, str(x.dtype)),),
    ),
    "set": Row(lambda m, x: {m.linear(x)}, "a set, .*a list", (lambda m, x: [m.linear(x)],)),
    "dict": Row(
        lambda m, x: x * m.options.scale,  # type: ignore[attr-defined]
        "__getattr__ that is no function of Python's .*plain dict",
        (lambda m, x: x * {"scale": 2.0}["scale"],),
    ),
    "replaced": Row(Net.counted, "update the tensors there in place", (Net.averaged,)),
    "put": Row(Net.put, SHAPES, (Net.spread,)),
    "fill": Row(Net.fill, SHAPES, (lambda m, x: torch.where(m.linear(x) > 0, x, m.linear(x)),)),
    "select": Row(
        lambda m, x: x[m.linear(x) > 0].sum() * x,
        SHAPES,
        (lambda m, x: (x * (m.linear(x) > 0)).sum() * x,),
    ),
    "branch": Row(
        lambda m, x: x * 2 if torch.rand(()) > 0.5 else x,
        VALUES,
        (lambda m, x: torch.where(torch.rand(()) > 0.5, x * 2, x),),
    ),
    "tolist": Row(lambda m, x: x * x.tolist()[0][0], VALUES, (lambda m, x: x * x[0, 0],)),
    "causal mask": Row(
        lambda m, x: m.encoder(x[None], causal(x) + torch.rand(()))[0],
        "looks at a mask's values to see whether it is causal.*is_causal=True",
        (
            lambda m, x: m.encoder(x[None], causal(x) + torch.rand(()), is_causal=True)[0],
            lambda m, x: m.encoder(x[None], causal(x))[0],
        ),
    ),
    "nn.Buffer": Row(
        Net.to_dtype_of,
        r"assigns an nn\.Buffer .*register_buffer",
        (Net.to_dtype_of_plain,),
    ),
    "TorchScript's isinstance": Row(
        lambda m, x: x * 2 if torch.jit.isinstance(x, Tensor) else x,
        "it calls torch.jit.isinstance, .*Python's isinstance",
        (lambda m, x: x * 2 if isinstance(x, Tensor) else x,),
    ),
    "times changed": Row(
        lambda m, x: x * 2 if x._version > 5 else x,
        r"reads how often a tensor was changed \(\._version\)",
        (lambda m, x: x * 2,),
    ),
    "missing global": Row(
        missing,
        r"reads a global that does not exist.*NAME = None",
        (lambda m, x: x if NOTHING is None else x * 2,),
    ),
    "globals": Row(
        lambda m, x: x if globals().get("NOTHING") is None else x * 2,
        r"looks names up by globals\(\).*read the name itself",
        (lambda m, x: x if NOTHING is None else x * 2,),
    ),
    "record": Row(
        Net.record,
        r"__enter__\(\) of a record_function, .*`with record_function.*record_module_names=False",
        (Net.recorded,),
    ),
}

OTHERS: dict[str, tuple[Form, str]] = {
    "shapes": (
        lambda m, x: m.linear(x) + torch.ones(2, 5),
        r"fails there: '[^']*broadcast[^']*'\. If the model runs without memopt",
    ),
    "input": (lambda m, x: (input(), x)[1], r"`input` .*take it out of the forward"),
    "address": (
        lambda m, x: m.linear(x) * (x.data_ptr() == m.linear.weight.data_ptr()),
        r"it reads where a tensor lies in memory \(data_ptr\(\)\)",
    ),
    "thread": (Net.step_aside, "it uses a thread, .*outside of the model"),
}
SAYS: dict[str, Form] = {
    "print": lambda m, x: (print("shape", x.shape), x)[1],
    "logging": lambda m, x: (logging.getLogger("users").info("x"), x)[1],
    "warning": lambda m, x: (warnings.warn("x", stacklevel=1), x)[1],
}


def _captured(form: Form) -> None:
    torch._dynamo.reset()
    capture(Net(form), to_call(torch.randn(2, 3)))


@pytest.fixture(autouse=True)
def _checked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first torch.compile of a process, which turns the checks of values off."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


def _refusal(form: Form) -> str:
    """What is said of a form; "" if it is captured."""
    try:
        _captured(form)
    except CaptureError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ROWS)
def test_a_cause_is_named_and_its_remedy_works(name: str) -> None:
    row = ROWS[name]
    with pytest.raises(CaptureError, match=row.message) as refused:
        _captured(row.form)
    said = str(refused.value)
    assert ("data-dependent" in said) == (row.message is VALUES)
    assert "without a derivative" not in said
    assert ".." not in said.replace("(...)", "")
    for remedied in row.remedied:
        _captured(remedied)


@pytest.mark.parametrize("name", OTHERS)
def test_of_other_causes_torchs_words_are_passed_on(name: str) -> None:
    form, message = OTHERS[name]
    with pytest.raises(CaptureError, match=message) as refused:
        _captured(form)
    assert "data-dependent" not in str(refused.value)
    assert f"{form.__code__.co_filename}:" in str(refused.value)


@pytest.mark.parametrize("name", SAYS)
def test_what_is_printed_is_not_called_data_dependent(name: str) -> None:
    said = _refusal(SAYS[name])
    assert not said or "it prints, logs or warns" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It cannot\nkeep that. This is\nnot", "It cannot keep that"),
        ("Heading\n  Explanation: more", "Heading"),
        ("A sentence. Another.", "A sentence. Another"),
        ("", ""),
    ],
)
def test_sentences_are_whole(text: str, said: str) -> None:
    assert first_line(ValueError(text)) == said


class Layered(nn.Module):
    """Leaves out layers as often as its configuration said when it was made (BART's kin), or says
    in each step (Wav2Vec2's)."""

    def __init__(self, config: SimpleNamespace, copied: bool) -> None:
        super().__init__()
        self.config = config
        if copied:
            self.layerdrop = config.encoder_layerdrop


def test_layers_left_out_are_named_where_they_are_read() -> None:
    read = SimpleNamespace(speech_encoder_layerdrop=0.2, layerdrop=0.0)
    model = nn.ModuleDict(
        {
            "speech": Layered(read, copied=False),
            "text": Layered(SimpleNamespace(encoder_layerdrop=0.1), copied=True),
        }
    )
    said = known_remedy(model, CaptureError("Data-dependent branching"))
    assert said is not None
    assert said.endswith(
        ": set model.text.layerdrop = 0, set model.speech.config.speech_encoder_layerdrop = 0"
    )


@pytest.mark.parametrize("method", ["_mask_hidden_states", "_mask_input_features"])
def test_masks_drawn_in_python_are_named(method: str) -> None:
    model = nn.ModuleDict({"inner": nn.Linear(1, 1)})
    model.config = SimpleNamespace(apply_spec_augment=True)  # type: ignore[assignment]
    assert known_remedy(model, CaptureError("Data-dependent branching")) is None
    setattr(model["inner"], method, str)
    said = known_remedy(model, CaptureError("Data-dependent branching"))
    assert said is not None
    assert said.endswith(": set model.config.apply_spec_augment = False")


def test_numbers_drawn_by_a_model_that_may_keep_keys() -> None:
    """The cache was named as the cause."""
    model = Net(lambda _, x: x * random.uniform(0.5, 1.5))
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=PYTHON):
        capture(model, to_call(torch.randn(2, 3)))
