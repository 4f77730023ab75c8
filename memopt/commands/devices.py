"""The device that a command's options name: a preset, a file's, or either with other memory."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

from memopt.commands.output import value_of
from memopt.models.budget import parse_budget
from memopt.models.device import Device
from memopt.models.presets import find_device

_LIKE = "like"


def chosen_device(name: str | None, file: Path | None, capacity: str | None) -> Device | str | None:
    """Return the value for `device=`; None if the user named no device.

    Raises:
        OptionError: an unknown device or field, an unreadable file or size.
    """
    with value_of("--device-file"):
        if name is not None and file is not None:
            raise ValueError("the file names a device, and --device another: leave one out")
        found: Device | str | None = name if file is None else _read(file)
    with value_of("--device"):
        found = find_device(found) if isinstance(found, str) else found
    if capacity is None:
        return found
    base = found or Device()
    with value_of("--capacity"):
        size = parse_budget(int(capacity) if capacity.isdecimal() else capacity, 1)
        if size is None or size < 2**20:
            raise ValueError(
                f"{capacity} is {size} bytes: write the unit, such as {capacity.strip()}GiB"
            )
    return replace(base, capacity_bytes=size)


def _read(path: Path) -> Device:
    """Read a device's fields; `like` names the preset that has the others."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    known = {field.name for field in fields(Device)} - {"network"}
    unknown = sorted(set(given) - known - {_LIKE}) if isinstance(given, dict) else ["no object"]
    if unknown:
        raise ValueError(
            f"{path}: a device has no {', '.join(unknown)}; it has {', '.join(sorted(known))}, and "
            '"like", the preset whose figures and network the others are'
        )
    base = find_device(given.pop(_LIKE)) if _LIKE in given else Device()
    try:
        return replace(base, **{name: value for name, value in given.items() if value is not None})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error
