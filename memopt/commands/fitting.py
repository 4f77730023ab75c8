"""`memopt fits`: whether a model trains on one device or many, and how to make it fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

import memopt
from memopt.api.cluster import tokens_of
from memopt.api.fits import DEFAULT_STRATEGIES, Fits
from memopt.api.ladder import Only, ladder
from memopt.api.mesh_search import MeshSearch
from memopt.api.size_search import largest_size
from memopt.api.solving import budget_on
from memopt.commands import options
from memopt.commands.output import OptionError, say, say_json, value_of
from memopt.commands.targets import NamedModel
from memopt.models.budget import MINIMUM, parse_budget
from memopt.models.options import StepOptions, parse_returns
from memopt.report.ladder import (
    CHUNKED,
    Ladder,
    MeshRung,
    Rung,
    best_mesh,
    mesh_figures,
    mesh_table,
)

SOLVED = ("batch", "sequence", "gpus", "mesh")
_MOST = 8
"""Sizes that `--solve` tries at most."""


@options.with_model_options
def fits(
    model: options.ModelOptions,
    budget: Annotated[
        str | None, typer.Option(help='Bytes or "60GiB". Left out: the device\'s capacity.')
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask these instead (see `memopt strategies`; may be given several times)."
        ),
    ] = None,
    solve: Annotated[
        str | None,
        typer.Option(
            help="batch, sequence: the largest that fits. gpus: the fewest. mesh: of --gpus, that "
            "with the most tokens/s."
        ),
    ] = None,
) -> None:
    """Say whether a model trains on a device, what takes the memory, and how to make it fit."""
    limit = options.budget_of(budget)
    with value_of("--budget"):
        if isinstance(limit, str) and (limit == MINIMUM or parse_budget(limit, 1) in (0, 1)):
            raise ValueError(f'{limit!r} is no number of bytes of a device: write "60GiB"')
    model = replace(model, mode=model.how)
    for name in strategy or ():
        options.check_strategy(name)
    with value_of("--returns"):
        step = StepOptions(returns=parse_returns(model.returns))
    with value_of("--solve"):
        if solve is not None and solve not in SOLVED:
            raise ValueError(f"there is no {solve!r} to solve for; take {', '.join(SOLVED)}")
        if solve is not None and (strategy or model.mode != "estimate"):
            raise ValueError("goes with an estimate (--device H100), and without --strategy")
    if model.mode != "estimate" and limit is None and model.place is None and model.ranks is None:
        raise OptionError(
            'name a device (--gpu RTX4090), or a budget of this one (--budget "6GiB")'
        )
    if strategy or model.mode != "estimate":
        _ask_strategies(model, limit, strategy)
        return
    if model.optimizer is None:
        model = replace(model, optimizer="adamw")
    asked = _Asked(model, limit, step)
    if solve == "mesh":
        _say_meshes(asked, model)
        return
    found = asked.ladder("devices" if solve == "gpus" else "all")
    answer = asked.largest(solve, found) if solve in ("batch", "sequence") else None
    if solve == "gpus":
        answer = asked.fewest(found)
    if model.as_json:
        more = {} if solve is None else {"solved": {solve: answer}}
        say_json({**asked.header, **found.figures(), **more})
    elif not model.quiet:
        if asked.header:
            say(", ".join(f"{what} {size}" for what, size in asked.header.items()))
        say(str(found))
        if solve is not None:
            best = "the fewest" if solve == "gpus" else "the largest"
            say(f"{solve}: {'none fits' if answer is None else answer}, {best} that fits")


class _Asked:
    """A model and the request about it, for any size."""

    def __init__(
        self,
        model: options.ModelOptions,
        budget: int | str | None,
        step: StepOptions,
    ) -> None:
        self._model, self._budget, self._step = model, budget, step
        sizes = model.model.startswith("hf:")  # a factory chooses its own
        self.header = {"batch": model.batch, "sequence": model.sequence} if sizes else {}

    def _given(self, **sizes: int) -> tuple[NamedModel, dict[str, Any]]:
        """Return the model and the arguments of `ladder`, with other sizes."""
        model = replace(self._model, lora=None, ranks=None, **sizes)  # type: ignore[arg-type]
        arguments = model.arguments()
        step = replace(self._step, loss_fn=arguments["loss_fn"])
        named = NamedModel(arguments["model"], arguments["inputs"])
        if self.header and not sizes and (tokens := tokens_of(named.inputs)):
            self.header["sequence"] = tokens // model.batch  # a model may allow no more
        return named, {
            "device": arguments["device"],
            "budget": self._budget,
            "optimizer": model.optimizer,
            "lora": self._model.rank,
            "ranks": self._model.ranks or 1,
            "step": step,
            "progress": not model.silent,
        }

    def ladder(self, only: Only = "all", **sizes: int) -> Ladder:
        """Make the ladder."""
        named, arguments = self._given(**sizes)
        return ladder(named.model, named.inputs, **arguments, only=only, heard=self._heard)

    def _heard(self, rung: Rung | MeshRung) -> None:
        if not self._model.silent:
            typer.echo(f"... {rung}", err=True)

    def meshes(self) -> tuple[MeshRung, ...]:
        """Plan the meshes of the devices that are asked for.

        Raises:
            OptionError: no number of devices, or adapters.
        """
        if self._model.ranks is None or self._model.rank:
            raise OptionError("--solve mesh: say how many (--gpus 64), without --lora")
        arguments = self._given()[1]

        def load(parts: int) -> tuple[Any, Any]:
            if parts > 1 and self.header["sequence"] % parts:
                raise ValueError(f"{parts} ranks do not divide {self.header['sequence']} tokens")
            sizes = {"sequence": self.header["sequence"] // parts} if parts > 1 else {}
            one = self._given(**sizes)[0]
            return one.model, one.inputs

        place, budget = budget_on(arguments["device"], self._budget)
        search = MeshSearch(load, place, budget, self._model.optimizer, arguments["step"])
        return search.search(self._model.ranks, bool(self.header), self._heard)

    def largest(self, what: str, found: Ladder) -> int | None:
        """Return the largest batch or sequence of which a plan fits.

        Raises:
            OptionError: the model's factory chooses its sizes.
        """
        if not self._model.model.startswith("hf:"):
            raise OptionError("--solve: a factory chooses its own sizes; name a hf: model")

        limit = found.budget_bytes
        tried: list[int] = []

        def needed(size: int) -> int:
            tried.append(size)
            rungs = self.ladder(only="asked", **{what: size}).rungs
            return min((r.needed_bytes or limit + 1 for r in rungs), default=limit + 1)

        first: int = getattr(self._model, what)
        asked = [r for r in found.rungs if r.is_as_asked and CHUNKED not in r.changes]
        known = {first: min((r.needed_bytes or limit + 1 for r in asked), default=limit + 1)}
        return largest_size(needed, first, limit, lambda _size: len(tried) < _MOST, known)[0]

    def fewest(self, found: Ladder) -> int | None:
        """Return the fewest devices on which the step fits, sharded."""
        return min((rung.ranks for rung in found.rungs if rung.fits), default=None)


def _say_meshes(asked: _Asked, model: options.ModelOptions) -> None:
    """Find and print the mesh with the most tokens/s."""
    found = asked.meshes()
    best = best_mesh(found)
    if model.as_json:
        answer = None if best is None else dict(best.mesh.sizes)
        say_json({**asked.header, "meshes": mesh_figures(found), "solved": {"mesh": answer}})
    elif not model.quiet:
        say(", ".join(f"{what} {size}" for what, size in asked.header.items()) + " a micro-batch")
        say(mesh_table(found, "tokens/s"))
        say(f"mesh: {'none fits' if best is None else best.mesh}, the fastest tried that fits")


def _ask_strategies(
    model: options.ModelOptions, limit: int | str | None, strategy: list[str] | None
) -> None:
    arguments = model.arguments()
    del arguments["cache"]
    found = memopt.fits(**arguments, budget=limit, strategies=tuple(strategy or DEFAULT_STRATEGIES))
    if model.as_json:
        say_json(_figures(found))
    elif not model.quiet:
        say(str(found))


def _figures(found: Fits) -> dict[str, object]:
    return {
        "device": found.device.name,
        "budget_bytes": found.budget_bytes,
        "standing_bytes": dict(found.standing),
        "rows": [asdict(row) for row in found.rows],
        "notes": found.notes,
    }
