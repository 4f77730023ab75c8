"""Models named on the command line: MODULE:FACTORY, FILE.py:FACTORY or hf:CONFIG.json."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from memopt.commands.hugging_face import load_config
from memopt.commands.target import Sizes, Target, TargetError

FORMS = (
    "name a model as MODULE:FACTORY or FILE.py:FACTORY, where FACTORY() returns (model, inputs) or "
    "(model, inputs, loss_fn), or as hf:CONFIG.json, a Hugging Face configuration on disk"
)


def load_target(name: str, sizes: Sizes | None = None) -> Target:
    """Make the model of a name; the user's folder is searched for modules first.

    Raises:
        TargetError: the module, the factory or what it returns is not usable.
    """
    kind, _, rest = name.partition(":")
    if kind == "hf":
        return load_config(rest, sizes or Sizes())
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise TargetError(f"{name!r} names no model: {FORMS}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(module_name)
    factory: Any = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise TargetError(f"{module_name} has no {attribute!r}: {FORMS}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise TargetError(f"{name} is not a function: {FORMS}")
    return _called(name, factory)


def _import(module_name: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return _import_file(Path(module_name))
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.split(".")[0] == error.name.split(".")[0]:
            raise TargetError(
                f"there is no module {module_name!r} in {Path.cwd()} or among the installed "
                "packages: run memopt in the folder of your code, or name a FILE.py:FACTORY"
            ) from error
        raise TargetError(f"importing {module_name} fails: {_last_line(error)}") from error
    except Exception as error:  # a user's module may raise anything
        raise TargetError(f"importing {module_name} fails: {_last_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path} (looked from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As an import would: dataclasses and pickling look a module up by its name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _called(name: str, factory: Callable[..., Any]) -> Target:
    try:
        made = factory()
    except Exception as error:  # a user's factory may raise anything
        raise TargetError(
            f"{name}() fails: {_last_line(error)}. It is called without arguments and returns "
            "(model, inputs) or (model, inputs, loss_fn)"
        ) from error
    from torch import nn

    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        shown = type(made).__name__
        if isinstance(made, tuple):
            shown = f"({', '.join(type(item).__name__ for item in made)})"
        raise TargetError(
            f"{name}() returned {shown}; it must return (model, inputs) or "
            "(model, inputs, loss_fn), the model an nn.Module"
        )
    return Target(*made)


def _last_line(error: BaseException) -> str:
    """The error and the place in the user's code it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = ("<frozen", __file__)
    own = [frame for frame in frames if not frame.filename.startswith(inside)]
    own = [frame for frame in own if "site-packages" not in frame.filename] or own
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}{where}"
