"""The outside of a plan file: one JSON object that begins with a checksum of all the rest.

The bytes are {"checksum":"<SHA-256, hex>",<rest>, and the checksum is that of {<rest>, so a
flipped bit or a missing end is found before anything is parsed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from memopt.errors import PlanFileError
from memopt.models.codec import Reader
from memopt.models.serialize import canonical, parse

FORMAT = "memopt plan"
VERSION = 1
LARGEST_FILE_BYTES = 2**30

_BEFORE = b'{"checksum":"'
_AFTER = b'",'
_DIGEST_CHARACTERS = 64


def pack(value: dict[str, Any]) -> bytes:
    """The bytes of a plan file around `value`, which must be plain JSON values."""
    rest = canonical({"format": FORMAT, "value": value, "version": VERSION}) + b"\n"
    return _BEFORE + _digest(rest) + _AFTER + rest[1:]


def unpack(data: bytes) -> Reader:
    """The value inside the bytes of a plan file.

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
    _, value, _ = reader.fields("format", "value", "version")
    return value


def _digest(rest: bytes) -> bytes:
    return hashlib.sha256(rest).hexdigest().encode("ascii")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is never seen half-written: a temporary file beside it, then a rename.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only the owner can read.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        PlanFileError: it cannot be read, or is too large for a plan.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise PlanFileError(f"{path} has {size} bytes, too many for a plan file")
        return path.read_bytes()
    except OSError as error:
        raise PlanFileError(f"cannot read {path}: {error.strerror or error}") from error
