"""``det-lightning experiment ls``, ``show``, ``compare`` and ``logs``, which only read files of experiments.

Each command imports its parts when run, so that no command slows down the start of another.

Change here: options and printing; the contents of the table are made in ``det_lightning/experiments/trial_table.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from det_lightning import errors
from det_lightning.cli.arguments import Experiment, Experiments, JsonFlag
from det_lightning.cli.output import print_json, print_lines, print_table, report_errors, warn
from det_lightning.files.file_kinds import require_output

# How many failed trials are explained.
_MOST_REASONS = 3

Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page (.html) with charts instead.")]


@report_errors()
def ls(experiments: Experiments = Path("experiments"), json: JsonFlag = False) -> None:
    """List the experiments in a directory."""
    from det_lightning.experiments.directory import find_experiments
    from det_lightning.experiments.overview import summarize_experiment
    from det_lightning.experiments.trial_table import format_number

    if not experiments.is_dir():
        raise ValueError(f"There is no directory {experiments} with experiments; --experiments names another one.")
    summaries = [summarize_experiment(directory) for directory in find_experiments(experiments)]
    if json:
        print_json(summaries)
        return
    columns = [">ID", "NAME", "STATE", ">TRIALS", ">BEST", "STARTED", "DIRECTORY"]
    rows = [{**summary, "best": format_number(summary["best"])} for summary in summaries]
    print_table(columns, [[row[column.removeprefix(">").lower()] for column in columns] for row in rows])


@report_errors()
def show(
    experiment: Experiment,
    json: JsonFlag = False,
    html: Page = None,
    best: Annotated[
        bool, typer.Option("--best", help="Only print the path or URL of the best trial's checkpoint, for scripts.")
    ] = False,
) -> None:
    """Show the trials of an experiment, best first, with hyperparameters, metrics and best checkpoints."""
    _require_one({"--json": json, "--html": html is not None, "--best": best})
    details = _describe(experiment, with_curves=html is not None)
    if html is not None:
        _write_page(details, html)
    elif best:
        _print_best(details)
    elif json:
        print_json(details)
    else:
        _print_details(details)


@report_errors()
def compare(
    experiments: Annotated[
        list[Path],
        typer.Argument(metavar="EXPERIMENT...", help="Directories of experiments.", show_default=False),
    ],
    json: JsonFlag = False,
    html: Page = None,
) -> None:
    """Compare the best trials of several experiments: metrics, seeds, different hyperparameters."""
    from det_lightning.experiments.trial_table import compare_experiments

    _require_one({"--json": json, "--html": html is not None})
    compared = compare_experiments([_describe(given, with_curves=html is not None) for given in experiments])
    if html is not None:
        _write_page(compared, html, compared=True)
    elif json:
        print_json(compared)
    else:
        _print_details(compared, compared=True)


def _describe(experiment: Path, *, with_curves: bool) -> dict[str, Any]:
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.experiments.overview import describe_experiment

    return describe_experiment(ExperimentDirectory.existing(experiment), with_curves=with_curves)


def _require_one(outputs: dict[str, bool]) -> None:
    """Raise a ValueError if several options with an output of their own are given."""
    given = [option for option, is_given in outputs.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"Use only one of {' and '.join(given)}.")


def _write_page(details: dict[str, Any], file: Path, *, compared: bool = False) -> None:
    from det_lightning.experiments.report import write_report

    require_output(file, (".html",))
    try:
        write_report(details, file, compared=compared)
    except ImportError as error:
        raise ValueError(str(error)) from error
    warn(f"Wrote {file}.")


def _print_details(details: dict[str, Any], *, compared: bool = False) -> None:
    """Print everything known about an experiment, with a table of trials without empty columns."""
    from det_lightning.experiments.trial_table import divide_hparams, format_cell, format_number, make_columns

    trials = details["trials"]
    known = {**details, "best": format_number(details["best"])}
    if details["best_trial"] is not None:
        known["best"] += f", of {'' if compared else 'trial '}{details['best_trial']} (*)"
    name = "hyperparameters of all trials" if len(trials) > 1 else "hyperparameters"
    known[name] = divide_hparams(trials)[1]
    left_out = ("trials", "best_trial", "logarithmic", "messages", "missing_metric")
    print_lines(f"{name}: {value}" for name, value in known.items() if name not in left_out and value not in (None, ""))
    messages = [*details["messages"], details.get("missing_metric")]
    print_lines(f"message: {message}" for message in messages if message is not None)
    if columns := make_columns(details, compared=compared):
        headings = [f"{'>' if column.is_number else ''}{column.heading}" for column in columns]
        print_table(headings, zip(*([format_cell(cell) for cell in column.cells] for column in columns), strict=True))
    failed = [trial for trial in trials if trial["state"] == "ERROR" and trial["reason"]]
    print_lines(f"trial {trial['id']}: {trial['reason']}" for trial in failed[:_MOST_REASONS])


def _print_best(details: dict[str, Any]) -> None:
    """Print the path or URL of the best trial's checkpoint; raise an error if it is not known to exist."""
    from det_lightning.experiments.trial_table import has_other_checkpoint

    trial = next((trial for trial in details["trials"] if trial["id"] == details["best_trial"]), None)
    if trial is None:
        missing = details["missing_metric"] or f"No trial has reported {details['metric']} yet."
        raise ValueError(f"The experiment in {details['directory']} has no best trial. {missing}")
    if trial["checkpoint"] is None:
        raise ValueError(f"The best trial, {trial['id']}, has no checkpoint.")
    if not trial["checkpoint_exists"]:
        what = "does not exist any more" if trial["checkpoint_exists"] is False else "cannot be looked for"
        where = trial["checkpoint_path"] or trial["checkpoint"]
        raise errors.ExperimentError(
            f"The checkpoint of the best trial, {trial['id']}, {what}: {where}, written after "
            f"{trial['checkpoint_batches']} batches. `det-lightning checkpoint ls STORAGE` lists those that exist."
        )
    if has_other_checkpoint(trial):
        warn(
            f"warning: the checkpoint was written after {trial['checkpoint_batches']} batches; the best validation was "
            f"after {trial['best_batches']}."
        )
    print_lines([trial["checkpoint_path"]])


@report_errors()
def logs(
    directory: Experiment,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", help="The number of a trial.", show_default=False)],
) -> None:
    """Print the standard output and error of a trial; the frames of libraries in tracebacks are only in the file."""
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.tracebacks import shorten_lines

    log = ExperimentDirectory.existing(directory).trial(trial) / "log.txt"
    if not log.is_file():
        raise ValueError(f"There is no log of trial {trial} in {directory}.")
    with log.open(encoding="utf-8", errors="replace") as lines:
        # Unmasked, because words in a log may look like secrets.
        print_lines(shorten_lines(line.rstrip("\n") for line in lines))
