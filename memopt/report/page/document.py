"""The page: one HTML file that holds everything it needs and loads nothing else.

The data are JSON in a block that browsers do not run, escaped so that nothing in it can end the
block; the script writes them as text, never as markup. The page's own policy (Content-Security-
Policy) lets only its two scripts run, by their hashes, and forbids every connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

from memopt.models.folders import write_whole
from memopt.report.page.data import Subject, page_data
from memopt.report.page.figures import MISSING, colors, figure_items

SCRIPTS = ("words.js", "step.js", "plots.js", "panels.js", "main.js")
_FRAME_PIXELS = 900


@dataclass(frozen=True)
class Page:
    """A page about plans. Notebooks show it in a frame; `write` makes a file of it."""

    subject: Subject

    @cached_property
    def html(self) -> str:
        """Return the page as HTML.

        Raises:
            ImportError: bokeh is missing; names the extra to install.
        """
        library = _library()
        script = "\n".join(_asset(name) for name in SCRIPTS)
        data = {**page_data(self.subject), "colors": colors()}
        units = data["units"]
        time_name = units["time"]["name"]
        step_axis = "instruction" if units["in_steps"] else f"time in the step ({time_name})"
        items = figure_items(units["memory"]["name"], time_name, step_axis)
        return Template(_asset("page.html")).substitute(
            policy=policy(library, script),
            title=escape(f"{self.subject.title}: memory and time"),
            heading=escape(self.subject.title),
            device=escape(self.subject.opened.device.name),
            style=_asset("page.css"),
            data=json_block(data),
            figures=json_block(items),
            library=library,
            script=script,
        )

    def write(self, path: str | PathLike[str]) -> None:
        """Write the page to a file, ".html".

        Raises:
            ImportError: bokeh is missing. OSError: the file cannot be written.
        """
        write_whole(path, self.html.encode())

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{escape(self.html)}" '
            f'style="width:100%;height:{_FRAME_PIXELS}px;border:0"></iframe>'
        )


def json_block(value: Any) -> str:
    """Write JSON for a `<script type="application/json">`. It is escaped so that it cannot end the
    block, begin a comment, or break a line with U+2028 or U+2029."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def policy(*scripts: str) -> str:
    """Write a Content-Security-Policy that allows these scripts, inline styles and data: pictures
    (Bokeh's icons), and forbids everything else."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("memopt.report.page").joinpath(name).read_text(encoding="utf-8")


@cache
def _library() -> str:
    """Return the source of BokehJS's core."""
    try:
        import bokeh
    except ImportError as error:
        raise ImportError(MISSING) from error
    path = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
    text = path.read_text(encoding="utf-8")
    # The browser hashes the element's text as it reads it, so nothing may end the element early.
    return text.replace("</script", "<\\/script").replace("\r\n", "\n")
