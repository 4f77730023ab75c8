"""Runs a declared benchmark: its options, its cases one by one, its page.

A benchmark is a module's `BENCHMARK`, or a constant of its name (`HOMES`). A finished case's rows
are kept in out/NAME.json (--resume), so that a run cut short, Ctrl-C included, is taken up by the
same command. `--out` writes the page after every case. What the page says beside its tables stands
in the page itself: a run replaces only what is between `<!-- NAME: begin -->` and
`<!-- NAME: end -->`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.table import Kept, joined, table

BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
Cases = Mapping[str, tuple[Any, ...]]
HOMES = {
    "rotor_solve": "rotor_paper", "minimalloc": "hard_placements", "long_context": "moved_llama",
    "olla_cp_sat": "olla_steps", "limits": "auto_portfolio", "partitioner": "compiled_planning",
    "engines": "sharded",
}  # fmt: skip
"""Benchmark → the module of another, about the same thing, that declares it, too."""


@dataclass(frozen=True)
class OneOf:
    """An option that is one of some values; the first if it is not given."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A row of which only its line of the table is needed, and what is not as it should be."""

    text: str
    failed: str = ""


@dataclass(frozen=True)
class Benchmark:
    """What is measured, case by case, and the page that the rows make.

    Attributes:
        cases: name → arguments of `measure`, or a function of the options that gives them.
        measure: options and a case's arguments → its rows; None: the case is not finished.
        row: the dataclass of plain values that a row is; what its field "failed" says is wrong.
        page: the file that `--out` writes if none is named; "": docs/results/NAME.md.
        head: of the page's table.
        line: row → its line of the table.
        summary: rows and options → what is said before the table.
        blocks: rows and options → the page's Markdown, or several blocks by their names on the
            page; None: the summary and the table.
        options: name → its default, which says its type; a type has the default None, a tuple any
            number of values, False is a flag. See `OneOf`.
        selects: options that choose cases; all others have to be the same for rows of one page.
        marks: a function of the options that gives what has to be the same, if that is not it.
        prepare: called before the first case, to compile what is compiled.
        failures: rows and options → what is not as it should be; the exit status is 1 then.
        apart: whether every case has a process of its own.
        rows_file: where rows are kept if --resume is not given; None: out/NAME.json.
        pictures: rows and options → figures written beside the page, `out`.
    """

    cases: Cases | Callable[[Any], Cases]
    measure: Callable[..., Sequence[Any] | None]
    row: type[Any] = Line
    page: str = ""
    head: str = ""
    line: Callable[[Any], str | Sequence[object]] = lambda row: row.text
    summary: Callable[[list[Any], Any], str] | None = None
    blocks: Callable[[list[Any], Any], str | dict[str, str]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    selects: tuple[str, ...] = ()
    marks: Callable[[Any], dict[str, Any]] | None = None
    prepare: Callable[[Any], object] | None = None
    failures: Callable[[list[Any], Any], list[str]] | None = None
    apart: bool = False
    rows_file: str | None = None
    pictures: Callable[[list[Any], Any], object] | None = None

    def __post_init__(self) -> None:
        """Say how a benchmark is run where its own module is what Python runs."""
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        name = spec.name.removeprefix("benchmarks.") if spec is not None else ""
        if spec is not None and spec.name == f"benchmarks.{name}" and name != "__main__":
            raise SystemExit(f"it is run by python -m benchmarks {name}")

    def all_cases(self, given: Any) -> Cases:
        return self.cases(given) if callable(self.cases) else self.cases

    def made(self, rows: list[Any], given: Any) -> dict[str, str]:
        if self.blocks is not None:
            made = self.blocks(rows, given)
            return made if isinstance(made, dict) else {"results": made}
        summary = self.summary(rows, given) if self.summary is not None else ""
        return {"results": joined(summary, table(self.head, map(self.line, rows)))}

    def settings(self, given: Any) -> dict[str, Any]:
        """Give what rows must share to stand on one page."""
        if self.marks is not None:
            return self.marks(given)
        names = sorted({*self.options, "threads"} - {*self.selects})
        return {"torch": torch.__version__, **{name: getattr(given, name) for name in names}}


def crossed(*parts: Iterable[Any]) -> Cases:
    """Make a case of every combination of a part of each; its name is theirs."""

    def word(part: Any) -> str:
        name = getattr(part, "name", part)
        return f"{name:g}" if isinstance(name, float) else str(name)

    return {" ".join(map(word, case)): case for case in product(*parts)}


def named(names: Sequence[str]) -> Cases:
    """Make cases whose only argument is their name."""
    return {name: (name,) for name in names}


def run(name: str, words: Sequence[str]) -> int:
    """Run a benchmark by its name; 1 if something is not as it should be, 130 if interrupted."""
    benchmark, given, chosen = parsed(name, words)
    cases = benchmark.all_cases(given)
    torch.set_num_threads(given.threads)
    path = given.resume or Path(benchmark.rows_file or f"out/{name}.json")
    kept = Kept(path, benchmark.row, benchmark.settings(given), fresh=given.fresh)
    missing = [one for one in chosen if given.fresh or one not in kept.rows]
    missing = [] if given.report else missing
    command = _command(name, benchmark, given)
    if missing and benchmark.prepare is not None:
        benchmark.prepare(given)
    try:
        for case, rows in _measured(name, benchmark, given, missing):
            if rows is not None:
                kept.add(case, rows)
                _write(benchmark, kept.ordered(cases), given, command)
            print(f"{time.strftime('%H:%M:%S')} {case}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; the same command takes up what {path} keeps", file=sys.stderr)
        return 130
    rows = kept.ordered(cases)
    if not rows:
        print("there are no rows yet", file=sys.stderr)
        return int(bool(missing))
    for text in _write(benchmark, rows, given, command).values():
        print(f"{text}\n")
    failures = benchmark.failures(rows, given) if benchmark.failures is not None else []
    failures += [row.failed for row in rows if getattr(row, "failed", "")]
    left = [case for case in chosen if case not in kept.rows]
    failures += [f"not finished: {', '.join(left)}"] * bool(left and not given.report)
    for text in failures:
        print(text, file=sys.stderr)
    return int(bool(failures))


def declared(name: str) -> tuple[Benchmark, str | None]:
    """Import a benchmark, and what its module says of it."""
    module = importlib.import_module(f"benchmarks.{HOMES.get(name, name)}")
    return getattr(module, name.upper() if name in HOMES else "BENCHMARK"), module.__doc__


def parsed(name: str, words: Sequence[str]) -> tuple[Benchmark, argparse.Namespace, list[str]]:
    """Read a command: the benchmark, its options, and the cases that they choose."""
    benchmark, about = declared(name)
    page = benchmark.page or f"docs/results/{name}.md"
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="CASE", help="cases of these names, or of these words of it")
    add("--out", type=Path, nargs="?", const=Path(page), help=f"[{page}]")
    add("--resume", type=Path, metavar="FILE", help="where finished rows are kept")
    add("--fresh", action="store_true", help="measure kept cases again")
    add("--report", action="store_true", help="only show what is kept")
    add("--threads", type=int, default=1, help="of torch [1]")
    if benchmark.apart:
        add("--jobs", type=int, default=1, help="cases at once [1]")
    for option, default in benchmark.options.items():
        how: dict[str, Any] = {"type": type(default), "default": default, "help": f"[{default}]"}
        if isinstance(default, type):
            how = {"type": default}
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        elif isinstance(default, OneOf):
            how = {"choices": default.values, "default": default.values[0]}
        elif isinstance(default, tuple):
            how |= {
                "type": type(default[0]),
                "nargs": "*",
                "help": f"[{' '.join(map(str, default))}]",
            }
        add(_flag(option), **how)
    given = parser.parse_args(words)
    return benchmark, given, _chosen(parser, benchmark.all_cases(given), given.only)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _chosen(parser: argparse.ArgumentParser, cases: Cases, only: Sequence[str] | None) -> list[str]:
    """Give the cases that have a name of `only`, or all its words; beginnings of words where no
    case has the words themselves."""
    if only is None:
        return list(cases)
    found: list[str] = []
    for text in only:
        words = text.split()
        exact = [c for c in cases if c == text or set(words) <= set(c.split())]
        begun = [c for c in cases if all(any(p.startswith(w) for p in c.split()) for w in words)]
        if not exact and not begun:
            parser.error(f"no case {text!r}; there are {', '.join(cases)}")
        found += exact or begun
    return list(dict.fromkeys(found))


def _measured(
    name: str, benchmark: Benchmark, given: Any, missing: Sequence[str]
) -> Iterator[tuple[str, Sequence[Any] | None]]:
    cases = benchmark.all_cases(given)
    if not benchmark.apart:
        for case in missing:
            yield case, benchmark.measure(given, *cases[case])
        return
    with ThreadPoolExecutor(given.jobs) as threads:
        rows = threads.map(partial(apart, _one, name, given), missing)
        yield from zip(missing, rows, strict=True)


def _one(name: str, given: Any, case: str) -> Sequence[Any] | None:
    benchmark, _ = declared(name)
    torch.set_num_threads(given.threads)
    return benchmark.measure(given, *benchmark.all_cases(given)[case])


def apart(
    function: Callable[..., Any], *given: Any, limit_s: float | None = None, **environment: str
) -> Any:
    """Call a function in a process of its own, with more variables in its environment.

    Raises:
        TimeoutError: it took longer than the limit, and was ended.
    """
    more = mock.patch.dict(os.environ, environment) if environment else nullcontext()
    with more, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        future = pool.submit(function, *given)
        try:
            return future.result(limit_s)
        except TimeoutError:
            for worker in active_children():
                worker.kill()
            raise


def _command(name: str, benchmark: Benchmark, given: Any) -> str:
    """Write the command that makes the page: the options that are not the default ones."""
    words = ["python -m benchmarks", name]
    for option, default in (*benchmark.options.items(), ("threads", 1)):
        value, flag = getattr(given, option), _flag(option)
        if isinstance(default, OneOf):
            default = default.values[0]
        if isinstance(default, bool) and value:
            words.append(flag)
        elif isinstance(value, (tuple, list)):
            if tuple(value) != default:
                words += [flag, *(f'"{one}"' if " " in str(one) else str(one) for one in value)]
        elif value is not None and value != default:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def _write(benchmark: Benchmark, rows: list[Any], given: Any, command: str) -> dict[str, str]:
    blocks = benchmark.made(rows, given)
    first = next(iter(blocks))
    about = f"`{command}`, torch {torch.__version__}, {time.strftime('%d %B %Y')}."
    blocks[first] = f"{about}\n\n{blocks[first]}"
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        known = given.out.exists()
        text = given.out.read_text(encoding="utf-8") if known else _empty(command, blocks)
        for name, block in blocks.items():
            text = replaced(text, name, block)
        given.out.write_text(text, encoding="utf-8")
        if benchmark.pictures is not None:
            benchmark.pictures(rows, given)
    return blocks


def _empty(command: str, blocks: Mapping[str, str]) -> str:
    places = (f"{BEGIN.format(name)}\n{END.format(name)}\n" for name in blocks)
    return "\n".join((f"# {command.split()[3]}\n", *places))


def replaced(text: str, name: str, block: str) -> str:
    """Put a block between its marks.

    Raises:
        SystemExit: the page has none of this name.
    """
    begin, end = BEGIN.format(name), END.format(name)
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise SystemExit(f"the page has no place for {name!r}: {begin} and {end}")
    return f"{before}{begin}\n{block}\n{end}{after}"
