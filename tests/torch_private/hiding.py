"""A torch without one of the names in the table."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from memopt.torch_private import access
from memopt.torch_private.rows import TABLE


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the table find all but one name."""
    row = TABLE[name]
    part, owner = access._part, object()
    last = name.rpartition(".")[2]
    try:
        owner, last = access._owner(row)
    except (ImportError, AttributeError):
        assert not access.expected(row)  # another version has it: nothing is to be hidden

    def without(asked: Any, attribute: str) -> Any:
        if attribute == last and (row.of is not None or asked is owner):
            raise AttributeError(f"{name} is hidden")
        return part(asked, attribute)

    forget()
    monkeypatch.setattr(access, "_part", without)
    monkeypatch.setattr(access, "DEGRADED", Counter())


def of_another_torch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a row be one of a version of torch that is not installed."""
    monkeypatch.setitem(TABLE, name, replace(TABLE[name], versions=()))
    monkeypatch.setattr(access, "KNOWN", (*access.KNOWN, version()))


def version() -> str:
    """The version of the torch that is installed, as rows name it."""
    import torch

    return ".".join(torch.__version__.split(".")[:2])


def forget() -> None:
    """Look every name up again."""
    for function in (access.private_once, access.known, access.attribute_name):
        function.cache_clear()
