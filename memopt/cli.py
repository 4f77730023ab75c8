"""The command line: `memopt demo`, `plan`, `fits`, `compare`, `explore`, `show`, `profile`,
`strategies`, `device`, `place`, `doctor`, `version`.

Exit status: 0 done; 1 failed; 2 wrong usage, wrong values of options included; 3 no plan fits the
budget, or no placement the capacity; 4 the plan file is damaged or belongs to something else.
"""

from __future__ import annotations

from typing import Annotated

import typer

from memopt.commands.comparing import compare
from memopt.commands.doctor import doctor
from memopt.commands.exploring import explore
from memopt.commands.fitting import fits
from memopt.commands.listing import device, strategies, version
from memopt.commands.options import reporting_failures
from memopt.commands.placing import place
from memopt.commands.planning import plan, show
from memopt.commands.profiling import profile

app = typer.Typer(
    name="memopt",
    help="Train a PyTorch model within a memory budget: plan the training step, check and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print memopt's version."
        ),
    ] = False,
) -> None:
    """Train a PyTorch model within a memory budget."""


def demo() -> None:
    """Plan and train a small model under several budgets, in a minute."""
    from memopt.demo import main

    main()


_PLANNING = (demo, plan, fits, compare, explore, show)
for _command in (*_PLANNING, profile, strategies, device, place, doctor, version):
    app.command()(reporting_failures(_command))


if __name__ == "__main__":
    app()
