"""`make bench` runs every benchmark there is; commands in the docs are of benchmarks that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from random import Random

import pytest
import torch

import memopt
from benchmarks import shapes
from benchmarks.__main__ import GPU, NAMES, main
from benchmarks.monet_runs import Started
from benchmarks.peers import hugging_face
from benchmarks.runner import BEGIN, END, parsed, replaced
from memopt.models.generate import random_graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "benchmarks"
OF_TESTS = ("index.md", "faults.md", "implementation_bounds.md")
"""Pages of results that no benchmark writes: the list of pages, the table of faults, which
tests/faults/test_table.py compares with the code, and the bounds of tests/kernels."""


def scripts() -> set[str]:
    """What is declared in the folder: by the name of its module or package, or by its own."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        home = path.parent.name if path.stem == "__init__" else path.stem
        for name in re.findall(r"^([A-Z_]+) = Benchmark\(", path.read_text(), re.MULTILINE):
            found.add(home if name == "BENCHMARK" else name.lower())
    return found


def test_every_benchmark_is_listed_once() -> None:
    listed = (*NAMES, *GPU)
    assert len(set(listed)) == len(listed)
    assert set(listed) == scripts()


def test_pages_name_scripts_that_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"python -m benchmarks[. ]([a-z]\w*)", text))
    assert len(named) > 15
    assert named <= scripts()


def test_commands_of_pages_are_understood() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    commands = {
        " ".join(one.split()) for one in re.findall(r"`python -m benchmarks ([^`]+)`", text)
    }
    assert len(commands) > 45
    for command in commands:
        name, *words = shlex.split(command)
        assert parsed(name, [word for word in words if word != "..."]), command


def test_every_page_that_a_benchmark_writes_has_its_marks() -> None:
    """All pages of results have a block, closed as it was opened; the first names the command."""
    for page in (ROOT / "docs" / "results").glob("*.md"):
        if page.name in OF_TESTS:
            continue
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"<!-- (\w+): begin -->", text)
        assert names, page.name
        assert re.findall(r"<!-- (\w+): end -->", text) == names
        assert re.search(r"`python -m benchmarks \w+[^`]*`, torch [^,]*, \d\d \w+ 20\d\d\.", text)


def test_tables_of_pages_have_as_many_columns_as_their_heads() -> None:
    for page in (ROOT / "docs" / "results").glob("*.md"):
        head = 0
        for line in page.read_text(encoding="utf-8").splitlines():
            bars = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not head or bars in (head, 0), f"{page.name}: {line}"
            head = bars


def test_a_block_is_replaced_and_nothing_else() -> None:
    page = f"before\n{BEGIN.format('x')}\nold\n{END.format('x')}\nafter\n"
    assert replaced(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="no place for 'y'"):
        replaced(page, "y", "new")


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "There are rotor_solve" in capsys.readouterr().err


def test_the_search_starts_from_plans_that_are_known() -> None:
    graph = random_graph(Random(3), 5)
    whole = replay(graph, store_all(graph))
    found = Started(start=False, known=(store_all(graph),)).solve(
        graph, whole.peak_bytes, time_limit_s=5.0
    )
    assert found.time_s is not None
    assert found.time_s <= whole.time_s


def test_plans_run_after_hugging_faces_checkpointing() -> None:
    model = shapes.gpt2_of(
        n_layer=1, n_embd=16, n_head=2, n_positions=128, vocab_size=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    contest = shapes.made(lambda: shapes._language("GPT-2", model, model.transformer.h, 16))
    how = {"strategy": "store-all", "progress": False}
    planned = memopt.plan(contest.module, contest.inputs, **how).apply(contest.module)
    hugging_face(contest)()
    checkpointed = [one.grad for one in model.parameters()]
    model.zero_grad()
    contest.step(planned)
    for one, grad in zip(model.parameters(), checkpointed, strict=True):
        assert one.grad is not None
        assert grad is not None
        assert torch.equal(one.grad, grad)
