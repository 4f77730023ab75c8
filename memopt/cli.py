"""The command line: `memopt demo`, `plan`, `show`, `profile`, `strategies`, `device`, `place`.

Exit status: 0 done; 1 failed; 2 wrong usage; 3 no plan fits the budget, or no placement the
capacity; 4 the plan file is damaged or belongs to something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memopt.commands.output import failures, say
from memopt.commands.profiling import Profiling

app = typer.Typer(
    name="memopt",
    help="Train a PyTorch model within a memory budget: plan the training step, check and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="MODULE:FACTORY or FILE.py:FACTORY, FACTORY() returning (model, inputs) or "
        "(model, inputs, loss_fn); or hf:CONFIG.json.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Batch size, for hf: models.")]
SequenceOption = Annotated[int, typer.Option(min=1, help="Tokens per sequence, for hf: models.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="Link rates, or what to estimate for: H100, A100, V100...")
]
ModeOption = Annotated[
    str, typer.Option(help="measure: run the kernels here. estimate: price them for --device.")
]
OptimizerOption = Annotated[
    str | None, typer.Option(help="Charge its state: sgd, sgd-momentum, adamw, adamw-8bit...")
]
CacheOption = Annotated[bool, typer.Option(help="Keep measured costs of kernels on disk.")]


@app.callback()
def _main() -> None:
    """Train a PyTorch model within a memory budget."""


@app.command()
def demo() -> None:
    """Plan and train a small model under several budgets, in a minute."""
    with failures(as_json=False):
        from memopt.demo import main

        main()


@app.command()
def plan(
    model: TargetArgument,
    budget: Annotated[
        str | None,
        typer.Option(help='Bytes, "6GiB", "6GB", a share such as 0.5, or min. Left out: no limit.'),
    ] = None,
    strategy: Annotated[str, typer.Option(help="See `memopt strategies`.")] = "rotor",
    out: Annotated[Path | None, typer.Option(help="Save the plan here (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw its memory here (png, svg).")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the solver.")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help='Most on the host at once: bytes or "6GiB"; 0: none.')
    ] = None,
    device: DeviceOption = None,
    mode: ModeOption = "measure",
    optimizer: OptimizerOption = None,
    batch: BatchOption = 4,
    sequence: SequenceOption = 128,
    cache: CacheOption = True,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Plan a model's training step within a memory budget."""
    from memopt.commands.planning import plan_command

    with failures(as_json):
        plan_command(
            model,
            budget=budget,
            strategy=strategy,
            out=out,
            picture=plot,
            time_limit_s=time_limit,
            host_budget=host_budget,
            how=Profiling(device, mode, optimizer, cache),
            sizes=(batch, sequence),
            as_json=as_json,
            quiet=quiet,
        )


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A file that `memopt plan --out` saved.")],
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here.")] = None,
    kind: Annotated[str, typer.Option(help="memory, schedule or timeline.")] = "memory",
    trace: Annotated[
        Path | None, typer.Option(help="Write the step here for ui.perfetto.dev (json).")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Run the planned model, too, and trace that beside it."),
    ] = None,
    batch: BatchOption = 4,
    sequence: SequenceOption = 128,
    as_json: JsonOption = False,
) -> None:
    """Show a saved plan, after checking it again."""
    from memopt.commands.planning import show_command

    with failures(as_json):
        show_command(
            file,
            picture=plot,
            kind=kind,
            trace=trace,
            measure=measure,
            sizes=(batch, sequence),
            as_json=as_json,
        )


@app.command()
def profile(
    model: TargetArgument,
    out: Annotated[Path | None, typer.Option(help="Save the graph here (JSON).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many operators to list.")] = 10,
    device: DeviceOption = None,
    mode: ModeOption = "measure",
    optimizer: OptimizerOption = None,
    batch: BatchOption = 4,
    sequence: SequenceOption = 128,
    cache: CacheOption = True,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what a model's training step costs, operator by operator."""
    from memopt.commands.profiling import profile_command

    with failures(as_json):
        profile_command(
            model,
            out=out,
            top=top,
            how=Profiling(device, mode, optimizer, cache),
            sizes=(batch, sequence),
            as_json=as_json,
            quiet=quiet,
        )


@app.command()
def strategies(as_json: JsonOption = False) -> None:
    """List the strategies by name."""
    from memopt.commands.listing import list_strategies

    with failures(as_json):
        list_strategies(as_json=as_json)


@app.command("device")
def devices(
    name: Annotated[str | None, typer.Argument(help="H100, A100, V100... or this.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices memopt knows, show one, or measure this machine (`memopt device this`)."""
    from memopt.commands.listing import show_devices

    with failures(as_json):
        show_devices(name, as_json=as_json)


@app.command()
def place(
    instance: Annotated[Path, typer.Argument(help="CSV with id, lower, upper, size.")],
    capacity: Annotated[int | None, typer.Option(help="What it must fit into, bytes.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the CSV with offsets here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Give buffers with known lifetimes addresses in as little memory as possible."""
    from memopt.commands.placing import place_command

    with failures(as_json):
        place_command(instance, capacity, time_limit, out, as_json=as_json)


@app.command()
def version() -> None:
    """Print memopt's version."""
    from memopt import __version__

    say(__version__)


if __name__ == "__main__":
    app()
