"""Finding the parts of a compiled model that Dynamo runs uncompiled, without telling its backend.

Dynamo passes every function that runs inside a compiled one to its `CatchErrorsWrapper`, which
returns compiled code or none: after a graph break inside a loop, a `with` or a `try`, too many
recompilations, or a suppressed error. The results are observed here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from memopt.torch_private.access import FILES_OF_MEMOPT, FILES_OF_TORCH, private, replace

_CONVERT = "torch._dynamo.convert_frame.CatchErrorsWrapper.__call__"
_NOTHING_TO_PLAN = ("No ops traced", "no content in function call")
_WITHOUT_TRACING = ("dispatch mode", "Dynamo tracing is disabled")
_DISABLED = (
    "Skip inlining `torch.compiler.disable()`d",
    "Skip calling `torch.compiler.disable()`d",
)
_WRAPPED = "SelfPlanning._running"
"""Name in the reason of a break at a model that `memopt.wrap` plans: Dynamo leaves it out, too."""
_REMEDIES = {
    "recompile": "raise torch._dynamo.config.recompile_limit, or pass numbers that change as "
    "tensors",
    "torch.compiler.disable": "leave torch.compiler.disable out where tensors with gradients are "
    "computed",
    "dispatch mode": "make the first step outside of that mode",
    "tracing is disabled": "set torch._dynamo.config.disable = False",
}
_ANY = (
    "write it with tensor operators (torch.where for a condition), or move it out of the loop, "
    "`with` or `try` around it: memopt plans around a break elsewhere"
)


@dataclass(frozen=True, slots=True)
class SkippedFrame:
    """A function that Dynamo runs uncompiled, or leaves out of the graphs around it."""

    path: str
    line: int
    name: str
    reason: str
    of_torch: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}, in {self.name}: {self.reason}"

    @property
    def message(self) -> str:
        """Return the message for the user."""
        known = _REMEDIES.items() if FILES_OF_MEMOPT not in self.reason else ()
        remedy = next((text for word, text in known if word in self.reason), _ANY)
        return (
            f'torch.compile(backend="memopt") does not plan {self.name} ({self.path}:{self.line}), '
            f"and its budget does not hold for what is computed there: {self.reason}. To have it "
            f"planned, {remedy}"
        )


def hear_skipped_frames(hears: Callable[[Any, SkippedFrame], None]) -> None:
    """Call `hears(backend, frame)` for every function that Dynamo skips from now on, for any
    backend; `backend` is Dynamo's object for it. An error in `hears` fails the call that is being
    compiled."""
    backend_of = private("torch._dynamo.eval_frame.innermost_backend")
    convert = private(_CONVERT)

    @functools.wraps(convert)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        before, breaks = _last_compilation(), dict(_breaks())
        made = convert(self, frame, *args, **kwargs)
        last = _last_compilation()
        found = _skipped(frame.f_code, made, None if last is before else last, breaks)
        if found is not None:
            hears(backend_of(self), found)
        return made

    replace(_CONVERT, call)


def _last_compilation() -> Any:
    """Return Dynamo's record of its last compilation, failed or not."""
    known = private("torch._dynamo.utils.get_compilation_metrics")()
    return known[-1] if known else None


def _breaks() -> dict[str, int]:
    """Return Dynamo's counts of graph breaks by reason."""
    counts: dict[str, int] = private("torch._dynamo.utils.counters")["graph_break"]
    return counts


def _skipped(
    code: CodeType, made: Any, compilation: Any, breaks: dict[str, int]
) -> SkippedFrame | None:
    """Return the part of a function that Dynamo did not compile, if it could need a plan."""
    path = code.co_filename
    if path.startswith(FILES_OF_MEMOPT):
        return None
    found = functools.partial(SkippedFrame, path, code.co_firstlineno)
    if made.guarded_code is not None:
        new = [reason for reason, count in _breaks().items() if count != breaks.get(reason, 0)]
        for reason in new:
            if reason.startswith(_DISABLED) and _WRAPPED not in reason:
                return found(f"a part of {code.co_name}", _explained(reason))
        return None
    if path.startswith(FILES_OF_TORCH):
        computes = f"{os.sep}functional.py" in path or code.co_name == "forward"
        inside = path.startswith(os.path.join(FILES_OF_TORCH, "nn"))
        return found(code.co_name, "it is called as it is", True) if computes and inside else None
    if compilation is not None and compilation.fail_reason:
        if compilation.fail_reason.startswith(_NOTHING_TO_PLAN):
            return None
        line = compilation.fail_user_frame_lineno
        at = f" (at {compilation.fail_user_frame_filename}:{line})" if line else ""
        first, _, rest = compilation.fail_reason.partition("\n")
        why = f"{first} {rest.partition(chr(10))[0]}" if first.endswith(":") else first
        return found(code.co_name, why.rstrip(".") + at)
    reason = getattr(made, "skip_reason", None) or ""
    without = any(words in reason for words in _WITHOUT_TRACING)
    return found(code.co_name, reason) if without else None


def _explained(reason: str) -> str:
    """Return Dynamo's explanation of a graph break, without its title and hints."""
    _, found, rest = reason.partition("Explanation: ")
    return (rest if found else reason).partition("\n")[0].rstrip(".")
