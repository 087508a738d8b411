"""``det-lightning run`` and ``det-lightning experiment``: experiments from Determined's configuration files.

The commands import what they need when they run, so that none slows down the start of another.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from det_lightning.cli.arguments import JsonFlag, Options, parse_options
from det_lightning.cli.output import print_json, print_lines, print_table, report_errors, warn

if TYPE_CHECKING:
    from det_lightning.config import ExperimentConfig
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.experiments.machines import Demand, Machines

EXIT_CODES = (
    "Exit codes: 0 the experiment is complete; 1 it failed; 2 the command or the configuration was used wrongly; "
    "130 it was paused by a signal."
)

# How many failed trials are named.
_MOST_SHOWN_TRIALS = 3

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="An experiment configuration.", show_default=False)]
Experiment = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT", help="The directory of an experiment.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="KEY=VALUE", help="Replace a value of the file, as in searcher.max_trials=4."),
]
Parent = Annotated[Path, typer.Option("--experiments", help="Where experiments get a directory each.")]
Slots = Annotated[
    int | None, typer.Option("--slots", min=1, help="Processes of each trial, in place of slots_per_trial.")
]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--logger", metavar="NAME", help="Log to csv, tensorboard, mlflow or wandb, too. May be given several times."
    ),
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Use no GPUs.")]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Run the trials on the Ray cluster at ADDRESS; `local` starts one."),
]
Trusted = Annotated[
    bool,
    typer.Option(
        "--trusted",
        help="Unpickle anything in the checkpoints that trials start from, running whatever code they contain. A trial "
        "resumes from what it wrote itself without this.",
    ),
]


@report_errors()
def run(
    config_file: Config,
    code: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The directory with the code.", show_default="the working directory")
    ] = Path(),
    override: Overrides = None,
    experiments: Parent = Path("experiments"),
    slots: Slots = None,
    cpu: Cpu = False,
    logger: Loggers = None,
    ray: Ray = None,
    trusted: Trusted = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials that would be created first as JSON; write nothing.")
    ] = False,
) -> None:
    """Train what an experiment configuration of Determined describes."""
    config = _read_or_report(config_file, override)
    if config is None:
        raise typer.Exit(2)
    from det_lightning.config import field_effects
    from det_lightning.experiments import experiment
    from det_lightning.masking import mask

    if dry_run:
        trials = [
            {"id": trial.trial_id, "trial_seed": trial.trial_seed, "hparams": mask(trial.hparams)}
            for trial in experiment.planned(config)
        ]
        print_json({"trials": trials})
        return
    if not code.is_dir():
        raise ValueError(f"{code} is not a directory; name the one with the code of the trials.")
    for note in config.notes:
        warn(f"note: {note}")
    for field in field_effects(config):
        if field.effect in ("ignored", "warned"):
            warn(f"{'warning' if field.effect == 'warned' else 'note'}: {field.path} has no effect here. {field.note}")
    if (code / "startup-hook.sh").is_file():
        warn(
            "warning: startup-hook.sh runs before each trial, here without a container: what it installs changes the "
            f"Python environment in {sys.prefix}."
        )
    demand = experiment.demand_of(config, slots, on_cpu=cpu)
    with experiment.machines_at(ray) as machines:
        machines.check(demand, experiments)
        directory = experiment.create(config, config_file, code, experiments, loggers=logger or (), trusted=trusted)
        warn(f"Experiment {directory.experiment_id} in {directory.path}")
        _run(directory, machines, demand)


@report_errors()
def resume(
    directory: Experiment, slots: Slots = None, cpu: Cpu = False, ray: Ray = None, trusted: Trusted = False
) -> None:
    """Continue an experiment that was paused, or whose runner was killed."""
    from det_lightning.config import read_config
    from det_lightning.experiments import experiment
    from det_lightning.experiments.directory import ExperimentDirectory

    found = ExperimentDirectory.existing(directory)
    demand = experiment.demand_of(read_config(found.config()), slots, on_cpu=cpu)
    with experiment.machines_at(ray) as machines:
        machines.check(demand, found.path)
        if trusted:
            found.trust()
        _run(found, machines, demand)


@report_errors()
def check(
    config_files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Experiment configurations.", show_default=False)
    ],
    override: Overrides = None,
    json: JsonFlag = False,
) -> None:
    """Validate experiment configurations, without the code beside them."""
    configs = [(file, _read_or_report(file, override)) for file in config_files]
    for file, config in configs:
        if config is not None and json:
            print_json(config.as_dict(masked=True))
        elif config is not None:
            print_lines([f"{file} is valid."])
            for note in config.notes:
                warn(f"note: {note}")
    if any(config is None for _, config in configs):
        raise typer.Exit(2)


@report_errors()
def ls(experiments: Parent = Path("experiments"), json: JsonFlag = False) -> None:
    """List the experiments in a directory."""
    from det_lightning.experiments.directory import find_experiments
    from det_lightning.experiments.overview import summary_of

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

        write_report(ExperimentDirectory.existing(directory), html)
        warn(f"Wrote {html}.")
        return
    is_run_here = (directory / "events.jsonl").exists()
    stored = [] if is_run_here else stored_experiments(experiment, parse_options(option))
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


@report_errors()
def stop(directory: Experiment) -> None:
    """Ask the runner of an experiment to pause it: its trials save and end. `resume` goes on with it."""
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.experiments.event_log import runner_of
    from det_lightning.experiments.overview import summary_of

    found = ExperimentDirectory.existing(directory)
    runner = runner_of(found.events)
    if runner is None:
        warn(f"No process runs the experiment in {directory}: it is {summary_of(found)['state']}.")
        return
    process, machine = runner
    if machine != platform.node():
        raise ValueError(f"The experiment in {directory} is run by {machine}, not by this machine. Stop it there.")
    os.kill(process, signal.SIGTERM)
    warn(f"Process {process} was asked to pause the experiment.")


def _read_or_report(file: Path, overrides: list[str] | None) -> ExperimentConfig | None:
    from det_lightning.config import read_config
    from det_lightning.errors import ConfigError

    try:
        return read_config(file, overrides or ())
    except ConfigError as error:
        for line in str(error).splitlines():
            warn(line)
        return None


def _run(directory: ExperimentDirectory, machines: Machines, demand: Demand) -> None:
    """Run an experiment in this process, and exit with the code for its outcome."""
    from det_lightning.experiments import experiment
    from det_lightning.experiments.live_view import live_view
    from det_lightning.experiments.overview import failed_trials

    with live_view(directory) as update:
        outcome = experiment.run(directory, update, machines, demand)
    if outcome is None:
        warn(f"Paused. Continue with: det-lightning experiment resume {directory.path}")
        raise typer.Exit(130)
    warn(f"Experiment {directory.experiment_id}: {outcome.value}")
    if outcome is not outcome.COMPLETED:
        for trial_id in failed_trials(directory)[:_MOST_SHOWN_TRIALS]:
            warn(f"What trial {trial_id} wrote: det-lightning experiment logs {directory.path} {trial_id}")
        raise typer.Exit(1)
