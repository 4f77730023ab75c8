"""The envelope of a plan file: one JSON object that begins with a checksum of all the rest.

The bytes are {"checksum":"<SHA-256, hex>",<rest>, and the checksum covers {<rest>, so that a
flipped bit or a missing end is found before anything is parsed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from memopt.errors import PlanFileError
from memopt.models.folders import write_whole
from memopt.models.reader import Reader, canonical, parse

FORMAT = "memopt plan"
VERSION = 1
LARGEST_FILE_BYTES = 2**27

_BEFORE = b'{"checksum":"'
_AFTER = b'",'
_DIGEST_CHARACTERS = 64


def pack(value: dict[str, Any]) -> bytes:
    """Wrap `value`, plain JSON values, in the bytes of a plan file."""
    rest = canonical({"format": FORMAT, "value": value, "version": VERSION}) + b"\n"
    return _BEFORE + _digest(rest) + _AFTER + rest[1:]


def unpack(data: bytes) -> Reader:
    """Return the value inside the bytes of a plan file.

    Raises:
        PlanFileError: not a plan file, damaged, or of another version.
    """
    end = len(_BEFORE) + _DIGEST_CHARACTERS
    if not data.startswith(_BEFORE) or data[end : end + len(_AFTER)] != _AFTER:
        raise PlanFileError(
            "not a memopt plan file (or its first bytes are damaged); plan.save(path) writes one"
        )
    rest = b"{" + data[end + len(_AFTER) :]
    if _digest(rest) != data[len(_BEFORE) : end]:
        raise PlanFileError(
            "the file is damaged: its checksum does not match, so it was cut off, changed or "
            "edited; save the plan again"
        )
    reader = Reader(parse(rest), "plan file")
    entries = reader.entries()
    if "format" not in entries or entries["format"].value != FORMAT:
        raise PlanFileError("not a memopt plan file; plan.save(path) writes one")
    version = entries["version"].whole() if "version" in entries else None
    if version != VERSION:
        raise PlanFileError(
            f"the file has version {version!r} of the format, this memopt reads version "
            f"{VERSION}; plan again with this memopt, or load it with the one that saved it"
        )
    return reader.fields("format", "value", "version")["value"]


def _digest(rest: bytes) -> bytes:
    return hashlib.sha256(rest).hexdigest().encode("ascii")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, as `write_whole` does.

    Raises:
        PlanFileError: the path exists and is no regular file; it is left unchanged.
        OSError: the folder does not exist or cannot be written.
    """
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise PlanFileError(
            f"cannot write {path}: it is {_kind(there)}, no file; name another path"
        )
    write_whole(path, data)


def read_plan(path: Path) -> Reader:
    """Return the value inside a plan file.

    Raises:
        PlanFileError: it cannot be read, or holds no plan of this version undamaged.
    """
    return unpack(read_bytes(path, _BEFORE))


def read_bytes(path: Path, beginning: bytes = b"") -> bytes:
    """Read a file; stop after its first bytes if they are not `beginning`.

    Raises:
        PlanFileError: the file cannot be read, is no regular file, or is too large for a plan.
    """
    try:
        # Opening a pipe must not wait until somebody writes into it.
        with open(path, "rb", opener=_open_at_once) as file:
            there = os.fstat(file.fileno())
            if not stat.S_ISREG(there.st_mode):
                raise PlanFileError(f"cannot read {path}: it is {_kind(there)}, no file")
            if there.st_size > LARGEST_FILE_BYTES:
                raise PlanFileError(f"{path} has {there.st_size} bytes, too many for a plan file")
            begin = file.read(len(beginning))
            if begin != beginning:
                return begin
            # The limit holds even if the size was wrong, or the file grows meanwhile.
            data = begin + file.read(LARGEST_FILE_BYTES)
    except OSError as error:
        raise PlanFileError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise PlanFileError(f"{path} has more bytes than a plan file can have")
    return data


_AT_ONCE = getattr(os, "O_NONBLOCK", 0)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | _AT_ONCE)


def _kind(there: os.stat_result) -> str:
    """Name the kind of a path that is no regular file."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(there.st_mode)), "something else")
