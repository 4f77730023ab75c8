"""The codec over annotations: what stands in JSON, and what is refused in which words."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import pytest

from memopt.errors import PlanFileError
from memopt.models.codec import (
    FLAT,
    NAME,
    SPARSE,
    Check,
    Codec,
    Columns,
    Natural,
    Rate,
    TaggedRows,
    codec,
    encode,
    read,
)
from memopt.models.reader import Reader


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    size: Natural = field(default=0, metadata={NAME: "inner_size"})


@dataclass(frozen=True)
class Go:
    to: int
    over: int | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Stop:
    pass


HEX = Codec(hex, lambda reader: int(reader.text(), 16))


@dataclass(frozen=True)
class Outer:
    whole: int
    rate: Rate
    colour: Colour | None
    pairs: tuple[Annotated[tuple[str, bool], Columns("name", "value")], ...]
    rates: dict[str, Rate]
    moves: tuple[Annotated[Go | Stop, TaggedRows("a move", {"go": Go, "stop": Stop})], ...]
    address: Annotated[int, HEX]
    inner: Inner = field(default=Inner(), metadata=FLAT)
    even: Annotated[int, Check("an even number", lambda value: value % 2 == 0)] = field(
        default=0, metadata=SPARSE
    )

    def __post_init__(self) -> None:
        if self.whole == 13:
            raise ValueError("Outer: 13 brings no luck")


VALUE = Outer(
    1,
    float("inf"),
    Colour.RED,
    (("x", True),),
    {"r": -0.0},
    (Go(1), Go(2, 3), Stop()),
    255,
    Inner(5),
)
JSON = {
    "whole": 1,
    "rate": "inf",
    "colour": "red",
    "pairs": [["x", True]],
    "rates": {"r": 0.0},
    "moves": [["go", 1], ["go", 2, 3], ["stop"]],
    "address": "0xff",
    "inner_size": 5,
}


def test_there_and_back() -> None:
    assert encode(VALUE) == JSON
    assert str(encode(VALUE)["rates"]["r"]) == "0.0"
    assert read(Outer, Reader(JSON, "file")) == VALUE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"whole": True}, "file.whole: expected a whole number, found True"),
        ({"whole": 13}, "file: Outer: 13 brings no luck"),
        ({"rate": float("nan")}, "file.rate: expected a finite number, found nan"),
        ({"colour": "blue"}, "file.colour: expected one of 'red', found 'blue'"),
        ({"pairs": [["x"]]}, "file.pairs[0]: expected [name, value], found ['x']"),
        ({"pairs": [["x", 1]]}, "file.pairs[0][1]: expected true or false, found 1"),
        ({"rates": {"r": "fast"}}, "file.rates.r: expected a number, found 'fast'"),
        ({"rates": []}, "file.rates: expected an object, found []"),
        ({"moves": [["run", 1]]}, "file.moves[0]: expected a move, found ['run', 1]"),
        ({"moves": [["go"]]}, "file.moves[0]: expected a move, found ['go']"),
        ({"moves": [["go", 1, None]]}, "file.moves[0]: expected a move, found ['go', 1, None]"),
        ({"moves": [["go", "1"]]}, "file.moves[0][1]: expected a whole number, found '1'"),
        ({"even": 3}, "file.even: expected an even number, found 3"),
        ({"even": None}, "file.even: expected a whole number, found None"),
        ({"inner_size": None}, "file.inner_size: expected a whole number, found None"),
        ({"inner_size": -1}, "file.inner_size: expected a whole number, at least 0, found -1"),
        ({"inner": {}}, "file: there is no field 'inner'"),
        ({"more": 1}, "file: there is no field 'more'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        read(Outer, Reader({**JSON, **change}, "file"))
    assert str(caught.value) == message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(PlanFileError, match="file: the field 'whole' is missing"):
        read(Outer, Reader({}, "file"))
    others = {name: item for name, item in JSON.items() if name != "inner_size"}
    with pytest.raises(PlanFileError, match="file: the field 'inner_size' is missing"):
        read(Outer, Reader(others, "file"))


def test_a_type_without_a_codec_is_an_error() -> None:
    with pytest.raises(TypeError, match="no codec for"):
        codec(set[int])
