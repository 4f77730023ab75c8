"""Builds the fake accelerator's extension: once for each torch, compiler and state of its sources.

The result stays in the user's cache folder, or in `MEMOPT_ACCELERATOR_DIR`. It is built as
`torch.utils.cpp_extension` would, by one call of the compiler, which needs no ninja; a lock that
the system takes back from who died lets other workers wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
NAME = "memopt_accelerator"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas")


def compiler() -> str | None:
    """The C++ compiler of this machine, if it has one."""
    return next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None
    )


def built() -> Path:
    """The extension's file, built if it is not there yet.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    with_what = compiler()
    assert with_what is not None
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    version = subprocess.run([with_what, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(b"\0".join([version, *(one.read_bytes() for one in sources)]))
    key.update(repr((torch.__version__, sys.version, FLAGS)).encode())
    folder = _cache() / f"torch-{torch.__version__}-{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{NAME}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(with_what, made)
    return made


def load() -> ModuleType:
    """Build the extension at need, and import it."""
    path = str(built())
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _cache() -> Path:
    given = os.environ.get("MEMOPT_ACCELERATOR_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / NAME


def _compile(with_what: str, made: Path) -> None:
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    unfinished = made.with_suffix(".unfinished")
    command = [
        with_what,
        *FLAGS,
        f"-DTORCH_EXTENSION_NAME={NAME}",
        *(f"-isystem{folder}" for folder in folders),
        *map(str, sorted(HERE.glob("*.cpp"))),
        *(f"-L{folder}" for folder in libraries),
        *(f"-Wl,-rpath,{folder}" for folder in libraries),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
        *("-o", str(unfinished)),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"the fake accelerator does not compile:\n{ran.stderr[-8000:]}")
    unfinished.replace(made)
