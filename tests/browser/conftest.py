"""A browser for the whole session, and pages in it that must do nothing they should not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.api.comparison import Comparison
from tests.browser.chromium import chromium
from tests.browser.reading import Open
from tests.plan.tiny import make, profiled

WIDTH, HEIGHT = 1400, 1000


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    try:
        path = chromium()
    except RuntimeError as error:
        pytest.skip(str(error))
    with playwright.sync_playwright() as driver:
        # Containers often forbid the sandbox of a browser that runs as root.
        launched = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file. When the test ends the page must have asked for nothing but itself, and
    neither failed nor been refused anything."""
    opened: list[tuple[Any, list[str], list[str], str]] = []

    def open_(path: Path, **options: Any) -> Any:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, **options)
        asked: list[str] = []
        wrong: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        opened.append((page, asked, wrong, path.as_uri()))
        return page

    yield open_
    for page, asked, wrong, url in opened:
        page.close()
        assert asked == [url]
        assert wrong == []


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Of a module, so that the page has shapes."""
    return memopt.curve(
        profiled(make("mlp")), strategies=["store-all", "rotor"], points=4, progress=False
    )


@pytest.fixture
def page(comparison: Comparison, tmp_path: Path, open_page: Open) -> Any:
    comparison.report(tmp_path / "page.html")
    return open_page(tmp_path / "page.html")
