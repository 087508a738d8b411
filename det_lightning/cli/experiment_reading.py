"""``det-lightning experiment ls``, ``show``, ``compare`` and ``logs``, which only read files of experiments.

Each command imports its parts when run, so that no command slows down the start of another.

Change here: options and printing; the contents of the table are made in ``det_lightning/experiments/trial_table.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from det_lightning import errors
from det_lightning.cli.arguments import Experiment, Experiments, JsonFlag, Options, parse_options
from det_lightning.cli.output import print_json, print_lines, print_table, report_errors, warn
from det_lightning.files.file_kinds import require_output

# How many failed trials are explained.
_MOST_REASONS = 3
# Of a comparison that is piped, which programs read as JSON.
_COMPARED_WIDTH = 120

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
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="The directory of an experiment, or path or URL of a storage of annotated checkpoints.",
            show_default=False,
        ),
    ],
    json: JsonFlag = False,
    html: Page = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="Sort trials by a metric of the best validation: best first for the metric of the search, smallest "
            "first for other metrics; -METRIC reverses the order.",
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Only print the path or URL of the best trial's checkpoint, for scripts.")
    ] = False,
    option: Options = None,
) -> None:
    """Show the trials of an experiment with hyperparameters, metrics and best checkpoints.

    For a storage, all experiments named by the checkpoints are shown (see `checkpoint annotate`).
    """
    from det_lightning.experiments.trial_table import sort_trials

    _require_alone("--html", html is not None, {"--json": json, "--sort": sort is not None, "--best": best})
    _require_alone("--best", best, {"--json": json, "--sort": sort is not None})
    found, is_run_here = _find_experiments(experiment, option, with_curves=html is not None)
    if html is not None:
        if len(found) > 1:
            raise ValueError(
                f"{experiment} holds {len(found)} experiments; `experiment compare` writes a page of several."
            )
        _write_page(found[0], html)
        return
    if best:
        _print_best(found)
        return
    if sort is not None:
        for details in found:
            details["trials"] = sort_trials(details, sort)
    if json:
        print_json(found[0] if is_run_here else {"experiments": found})
        return
    for index, details in enumerate(found):
        print_lines([""] if index > 0 else [])
        _print_details(details, sort)


@report_errors()
def compare(
    experiments: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT...",
            help="Directories of experiments, and paths or URLs of storages of checkpoints.",
            show_default=False,
        ),
    ],
    json: JsonFlag = False,
    html: Page = None,
    option: Options = None,
) -> None:
    """Compare the best trials of several experiments or storages: metrics, seeds, different hyperparameters."""
    from det_lightning.experiments.trial_table import COLUMNS, compare_experiments

    _require_alone("--html", html is not None, {"--json": json})
    found: list[dict[str, Any]] = []
    mistakes: list[str] = []
    for given in experiments:
        try:
            found += _find_experiments(given, option, with_curves=html is not None)[0]
        except errors.ExperimentError as e:
            mistakes.append(str(e))
    if mistakes:
        raise errors.ExperimentError("\n".join(mistakes))
    compared = compare_experiments(found)
    if html is not None:
        _write_page(compared, html, COLUMNS)
    elif json:
        print_json(compared)
    else:
        _print_details(compared, more_columns=COLUMNS)


def _find_experiments(given: str, option: list[str] | None, *, with_curves: bool) -> tuple[list[dict[str, Any]], bool]:
    """Return the experiments in a directory or storage, and whether ``det-lightning run`` made the directory."""
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.experiments.overview import describe_experiment
    from det_lightning.experiments.stored import read_stored_experiments

    is_run_here = (Path(given) / "events.jsonl").exists()
    stored = [] if is_run_here else read_stored_experiments(given, parse_options(option), with_curves=with_curves)
    if "://" in given and not stored:
        raise ValueError(
            f"No checkpoint in {given} names its experiment. `det-lightning checkpoint annotate` adds the records of "
            "Determined's master."
        )
    if stored:
        return stored, False
    return [describe_experiment(ExperimentDirectory.existing(Path(given)), with_curves=with_curves)], True


def _require_alone(option: str, is_given: bool, others: dict[str, bool]) -> None:
    """Raise a ValueError if an option with an output of its own is given beside ``others``."""
    beside = [name for name, is_beside in others.items() if is_beside]
    if is_given and beside:
        raise ValueError(f"{option} replaces all other output; leave out {' and '.join(beside)}.")


def _write_page(details: dict[str, Any], file: Path, more_columns: Sequence[str] = ()) -> None:
    from det_lightning.experiments.report import write_report

    require_output(file, (".html",))
    try:
        write_report(details, file, more_columns)
    except ImportError as error:
        raise ValueError(str(error)) from error
    warn(f"Wrote {file}.")


def _print_details(details: dict[str, Any], sorted_by: str | None = None, more_columns: Sequence[str] = ()) -> None:
    """Print everything known about an experiment, with a table of trials without empty columns."""
    from det_lightning.experiments.trial_table import divide_hparams, format_cell, format_number, make_columns

    trials = details["trials"]
    known = {**details, "best": format_number(details["best"])}
    if details["best_trial"] is not None:
        known["best"] += f", of {'' if more_columns else 'trial '}{details['best_trial']} (*)"
    name = "hyperparameters of all trials" if len(trials) > 1 else "hyperparameters"
    known[name] = divide_hparams(trials)[1]
    left_out = ("trials", "best_trial", "logarithmic", "messages", "missing_metric")
    print_lines(f"{name}: {value}" for name, value in known.items() if name not in left_out and value not in (None, ""))
    messages = [*details["messages"], details.get("missing_metric")]
    print_lines(f"message: {message}" for message in messages if message is not None)
    if columns := make_columns(details, sorted_by, more_columns):
        headings = [f"{'>' if column.is_number else ''}{column.heading}" for column in columns]
        cells = [[format_cell(cell) for cell in column.cells] for column in columns]
        print_table(headings, map(list, zip(*cells, strict=True)), *([_COMPARED_WIDTH] if more_columns else []))
    failed = [trial for trial in trials if trial["state"] == "ERROR" and trial.get("reason")]
    print_lines(f"trial {trial['id']}: {trial['reason']}" for trial in failed[:_MOST_REASONS])


def _print_best(found: list[dict[str, Any]]) -> None:
    """Print the path or URL of the best trial's checkpoint; raise an ExperimentError if it is not known to exist."""
    from det_lightning.experiments.trial_table import has_other_checkpoint

    if len(found) > 1:
        names = ", ".join(str(details["id"]) for details in found)
        raise ValueError(f"--best prints one path; got the experiments {names}. `checkpoint ls --best` lists all.")
    (details,) = found
    trial = next((trial for trial in details["trials"] if trial["id"] == details["best_trial"]), None)
    if trial is None:
        missing = details.get("missing_metric") or f"No trial has reported {details['metric']} yet."
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
