"""``det-lightning experiment ls``, ``show`` and ``logs``: experiments as their files describe them.

The commands import what they need when they run, so that none slows down the start of another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from det_lightning.cli.arguments import Experiment, Experiments, JsonFlag, Options, parse_options
from det_lightning.cli.output import print_json, print_lines, print_table, report_errors, warn
from det_lightning.files.file_kinds import require_file


@report_errors()
def ls(experiments: Experiments = Path("experiments"), json: JsonFlag = False) -> None:
    """List the experiments in a directory."""
    from det_lightning.experiments.directory import find_experiments
    from det_lightning.experiments.overview import summary_of

    if not experiments.is_dir():
        raise ValueError(f"There is no directory {experiments} with experiments; --experiments names another one.")
    summaries = [summary_of(directory) for directory in find_experiments(experiments)]
    if json:
        print_json(summaries)
        return
    _print_rows([">ID", "NAME", "STATE", ">TRIALS", "BEST", "STARTED", "DIRECTORY"], summaries)


@report_errors()
def show(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="The directory of an experiment, or path or URL of a storage of annotated checkpoints.",
            show_default=False,
        ),
    ],
    json: JsonFlag = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts instead.")
    ] = None,
    option: Options = None,
) -> None:
    """Show the trials of an experiment with their hyperparameters, metrics and best checkpoints.

    Of a storage whose checkpoints name their experiments (see `checkpoint annotate`) all experiments are shown.
    """
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.experiments.overview import details_of
    from det_lightning.experiments.stored import stored_experiments

    directory = Path(experiment)
    if html is not None:
        from det_lightning.experiments.report import write_report

        require_file(html, may_be_missing=True)
        write_report(ExperimentDirectory.existing(directory), html)
        warn(f"Wrote {html}.")
        return
    is_run_here = (directory / "events.jsonl").exists()
    stored = [] if is_run_here else stored_experiments(experiment, parse_options(option))
    if "://" in experiment and not stored:
        raise ValueError(
            f"No checkpoint in {experiment} names its experiment. `det-lightning checkpoint annotate` adds what "
            "Determined's master knew."
        )
    content = {"experiments": stored} if stored else details_of(ExperimentDirectory.existing(directory))
    if json:
        print_json(content)
        return
    for index, details in enumerate(stored or [content]):
        print_lines([""] if index > 0 else [])
        _print_details(details)


def _print_details(details: dict[str, Any]) -> None:
    print_lines([f"{name}: {value}" for name, value in details.items() if name != "trials"])
    columns = [">ID", "STATE", ">BATCHES", ">BEST", ">LATEST", ">RESTARTS", "CHECKPOINT", "HPARAMS"]
    _print_rows(columns, details["trials"])


def _print_rows(columns: list[str], rows: list[dict[str, Any]]) -> None:
    print_table(columns, [[row[column.removeprefix(">").lower()] for column in columns] for row in rows])


@report_errors()
def logs(
    directory: Experiment,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", help="The number of a trial.", show_default=False)],
) -> None:
    """Print what a trial wrote to its standard output and error."""
    from det_lightning.escaping import escape
    from det_lightning.experiments.directory import ExperimentDirectory

    log = ExperimentDirectory.existing(directory).trial(trial) / "log.txt"
    if not log.is_file():
        raise ValueError(f"There is no log of trial {trial} in {directory}.")
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:  # as the trial wrote it: its words may look like secrets
            typer.echo(escape(line.rstrip("\n")))
