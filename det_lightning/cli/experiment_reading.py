"""``det-lightning experiment ls``, ``show`` and ``logs``: experiments as their files describe them.

The commands import what they need when they run, so that none slows down the start of another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from det_lightning.cli.arguments import Experiment, Experiments, JsonFlag, Options, parse_options
from det_lightning.cli.output import print_json, print_lines, print_table, report_errors, warn
from det_lightning.cli.trial_table import is_of_other_validation, print_details, sort_trials
from det_lightning.files.file_kinds import require_file


@report_errors()
def ls(experiments: Experiments = Path("experiments"), json: JsonFlag = False) -> None:
    """List the experiments in a directory."""
    from det_lightning.experiments.directory import find_experiments
    from det_lightning.experiments.overview import format_number, summary_of

    if not experiments.is_dir():
        raise ValueError(f"There is no directory {experiments} with experiments; --experiments names another one.")
    summaries = [summary_of(directory) for directory in find_experiments(experiments)]
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
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts instead.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="Sort trials by the metric of their best validation: the best first for the metric of the search, "
            "the smallest for others; -METRIC reverses the order.",
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Only print the path or URL of the best trial's checkpoint, for scripts.")
    ] = False,
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
    found = stored or [details_of(ExperimentDirectory.existing(directory))]
    if best:
        storage = None if stored else ExperimentDirectory(directory).checkpoint_storage()
        _print_best(found, storage)
        return
    if sort is not None:
        for details in found:
            details["trials"] = sort_trials(details, sort)
    if json:
        print_json({"experiments": stored} if stored else found[0])
        return
    for index, details in enumerate(found):
        print_lines([""] if index > 0 else [])
        print_details(details, sort)


def _print_best(found: list[dict[str, Any]], storage: str | dict[str, Any] | None) -> None:
    """Print where the best trial's checkpoint is: in ``storage``, or in the one that describes the experiment."""
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

    if len(found) > 1:
        names = ", ".join(str(details["id"]) for details in found)
        raise ValueError(
            f"--best prints one path, but these are the experiments {names}. `checkpoint ls --best` lists all."
        )
    (details,) = found
    trial = next((trial for trial in details["trials"] if trial["id"] == details["best_trial"]), None)
    if trial is None:
        raise ValueError(f"No trial of the experiment in {details['directory']} has reported {details['metric']} yet.")
    if trial["checkpoint"] is None:
        raise ValueError(f"The best trial, {trial['id']}, has no checkpoint.")
    if is_of_other_validation(trial):
        warn(
            f"warning: the checkpoint was written after {trial['checkpoint_batches']} batches; the best validation was "
            f"after {trial['best_batches']}."
        )
    root = details["directory"] if storage is None else str(CheckpointStorage(storage))
    print_lines([f"{root.rstrip('/')}/{trial['checkpoint']}"])


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
