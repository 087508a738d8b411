"""``det-lightning run`` and ``experiment resume``, ``check`` and ``stop``, for Determined's configuration files.

Each command imports its parts when run, so that no command slows down the start of another.
"""

from __future__ import annotations

import enum
import os
import platform
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from det_lightning import errors
from det_lightning.cli.arguments import Experiment, Experiments, JsonFlag
from det_lightning.cli.output import print_json, print_lines, report_errors, warn
from det_lightning.startup_hook import STARTUP_HOOK, is_accepted

if TYPE_CHECKING:
    from det_lightning.config import ExperimentConfig
    from det_lightning.experiments.directory import ExperimentDirectory, Options
    from det_lightning.experiments.launcher import Launcher

EXIT_CODES = (
    "Exit codes: 0 success; 2 wrong usage, or a wrong configuration; of `run` and `resume` also 1 the experiment "
    "failed, and 130 a signal paused the experiment."
)

# How many lines of a start-up hook are shown, and how many failed trials are named.
_MOST_SHOWN_LINES = 40
_MOST_SHOWN_TRIALS = 3

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="An experiment configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="KEY=VALUE", help="Replace a value of the file, as in searcher.max_trials=4."),
]
Slots = Annotated[
    int | None,
    typer.Option("--slots", metavar="N", min=1, help="Processes of each trial, in place of slots_per_trial."),
]
Loggers = Annotated[
    list[str] | None,
    typer.Option("--logger", metavar="NAME", help="Also log to csv, tensorboard, mlflow or wandb. May be repeated."),
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Use no GPUs.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Run the trials on the Ray cluster at ADDRESS; `local` starts a cluster."
    ),
]
Trusted = Annotated[
    bool,
    typer.Option(
        "--trusted",
        help="Unpickle anything in the checkpoints that trials start from, which runs any code in the files. A trial "
        "resumes from its own checkpoints without this option.",
    ),
]


class Hook(str, enum.Enum):
    """The choices for a start-up hook."""

    run = "run"
    skip = "skip"


@report_errors()
def run(
    config_file: Config,
    code: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory with the code.", show_default="the working directory")
    ] = Path(),
    override: Overrides = None,
    experiments: Experiments = Path("experiments"),
    slots: Slots = None,
    cpu: Cpu = False,
    logger: Loggers = None,
    ray: Ray = None,
    trusted: Trusted = False,
    hook: Annotated[
        Hook | None,
        typer.Option(
            envvar="DET_LIGHTNING_HOOK",
            help="Run or skip startup-hook.sh. Without this option or a comment in the hook, a hook is an error.",
            show_default=False,
        ),
    ] = None,
    try_out: Annotated[
        bool,
        typer.Option("--try", help="A smoke run: one trial trains a few batches and keeps no checkpoint."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the first trials as JSON; write nothing.")] = False,
) -> None:
    """Train the trials of a Determined experiment configuration."""
    config = _read_or_report(config_file, override)
    if config is None:
        raise typer.Exit(2)
    from det_lightning.config import field_effects
    from det_lightning.experiments import lifecycle
    from det_lightning.experiments.directory import Options
    from det_lightning.experiments.search.search import MOST_PLANNED, plan_trials

    if dry_run:
        planned = plan_trials(config.searcher, config.hyperparameters, config.reproducibility.experiment_seed)
        if len(planned) >= MOST_PLANNED:
            warn(f"note: these are the first {len(planned):,} trials.")
        trials = [{"id": one.trial_id, "trial_seed": one.trial_seed, "hparams": one.hparams} for one in planned]
        print_json({"trials": trials})
        return
    if not code.is_dir():
        raise ValueError(f"{code} is not a directory; name the directory with the code of the trials.")
    for note in config.notes:
        warn(f"note: {note}")
    for field in field_effects(config):
        if field.effect in ("ignored", "warned"):
            warn(f"{'warning' if field.effect == 'warned' else 'note'}: {field.path} has no effect here. {field.note}")
    with_hook = _decide_on_hook(code, hook, try_out)
    options = Options(loggers=logger or [], trusted=trusted, slots=slots, cpu=cpu, ray=ray, tries=try_out)
    with lifecycle.find_launcher(ray) as launcher_class:
        launcher_class.check(lifecycle.make_demand(config, options), experiments)
        directory = lifecycle.create(config, config_file, code, experiments, options, with_hook=with_hook)
        warn(f"Experiment {directory.experiment_id} in {directory.path}")
        _run(directory, config, launcher_class, directory.options())


@report_errors()
def resume(
    directory: Experiment,
    slots: Slots = None,
    cpu: Annotated[bool | None, typer.Option("--cpu/--no-cpu", help="Use no GPUs.", show_default=False)] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="As for `run`; `none` runs the trials on this machine."),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Resume failed trials from their latest checkpoints, with all restarts."),
    ] = False,
    trusted: Trusted = False,
) -> None:
    """Continue an experiment after a pause, after a kill of the runner, or after failed trials.

    Options that you do not give are taken from the last `run` or `resume` of the experiment.
    """
    from det_lightning.config import read_config
    from det_lightning.experiments import lifecycle
    from det_lightning.experiments.directory import ExperimentDirectory

    found = ExperimentDirectory.existing(directory)
    given = {"slots": slots, "cpu": cpu, "ray": ray, "trusted": trusted or None}
    changes = {name: None if value == "none" else value for name, value in given.items() if value is not None}
    options = found.options().model_copy(update=changes)
    config = read_config(found.config)
    with lifecycle.find_launcher(options.ray) as launcher_class:
        launcher_class.check(lifecycle.make_demand(config, options), found.path)
        _run(found, config, launcher_class, options, retry_failed=retry_failed)


@report_errors()
def check(
    config_files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Experiment configurations.", show_default=False)
    ],
    override: Overrides = None,
    json: JsonFlag = False,
) -> None:
    """Validate experiment configurations, but not the code beside them."""
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
def stop(directory: Experiment) -> None:
    """Ask the runner of an experiment to pause: the trials save and end, and you go on with `resume`.

    Asked once more, the runner ends the trials at once.
    """
    from det_lightning.experiments.directory import ExperimentDirectory
    from det_lightning.experiments.event_log import find_runner
    from det_lightning.experiments.overview import summarize_experiment

    found = ExperimentDirectory.existing(directory)
    runner = find_runner(found.events)
    if runner is None:
        warn(f"No process runs the experiment in {directory}; the state is {summarize_experiment(found)['state']}.")
        return
    if runner.machine != platform.node():
        raise ValueError(
            f"The experiment in {directory} is run by {runner.machine}, not by this machine. Stop it there."
        )
    if not runner.is_locked:
        raise ValueError(
            f"{directory} has no file locks, so process {runner.process} may be another program by now. If it runs the "
            f"experiment, pause it with: kill {runner.process}"
        )
    os.kill(runner.process, signal.SIGTERM)
    warn(f"Process {runner.process} was asked to pause the experiment.")


def _decide_on_hook(code: Path, choice: Hook | None, is_try: bool) -> bool:
    """Return whether to run the start-up hook; show it and raise an error if neither the user nor a comment decided."""
    hook = code / STARTUP_HOOK
    if not hook.is_file() or choice is Hook.skip:
        return False
    text = hook.read_text(encoding="utf-8", errors="replace")
    if choice is Hook.run or is_accepted(text):
        warn(f"note: {STARTUP_HOOK} runs before each trial, here without a container.")
        return True
    if is_try:
        warn(f"note: {STARTUP_HOOK} is skipped in this smoke run; pass --hook run to run it.")
        return False
    lines = text.splitlines()
    for number, line in enumerate(lines[:_MOST_SHOWN_LINES], 1):
        warn(f"{hook}:{number}: {line}")
    if len(lines) > _MOST_SHOWN_LINES:
        warn(f"{hook}: and {len(lines) - _MOST_SHOWN_LINES} more lines")
    raise ValueError(
        f"{hook} would run these lines before each trial, here without a container: they may change the Python "
        f"environment in {sys.prefix}. Install its packages once, and use --hook skip; or use --hook run to run the "
        "hook. You can also set DET_LIGHTNING_HOOK, or write a comment `# det-lightning: ok` into the hook."
    )


def _read_or_report(file: Path, overrides: list[str] | None) -> ExperimentConfig | None:
    from det_lightning.config import read_config
    from det_lightning.errors import ConfigError

    try:
        return read_config(file, overrides or ())
    except ConfigError as error:
        for line in str(error).splitlines():
            warn(line)
        return None


def _run(
    directory: ExperimentDirectory,
    config: ExperimentConfig,
    launcher_class: type[Launcher],
    options: Options,
    *,
    retry_failed: bool = False,
) -> None:
    """Run an experiment in this process, and exit with the code of the outcome."""
    from det_lightning.experiments import lifecycle
    from det_lightning.experiments.live_view import live_view
    from det_lightning.experiments.overview import read_state

    with live_view() as update:
        try:
            outcome = lifecycle.run(directory, config, update, launcher_class, options, retry_failed=retry_failed)
        except BrokenPipeError:
            raise
        except (OSError, errors.StorageError) as e:  # such as a full disk
            again = _command("resume", directory.path)
            raise errors.ExperimentError(f"The experiment stopped: {e}. Once fixed, resume with: {again}") from e
    if outcome is None:
        warn(f"Paused. Resume with: {_command('resume', directory.path)}")
        raise typer.Exit(130)
    warn(f"Experiment {directory.experiment_id}: {outcome.value}")
    state = read_state(directory)
    if missing := state.explain_missing_metric():
        warn(f"warning: {missing}")
    if outcome is not outcome.COMPLETED:
        failed = [trial_id for trial_id, trial in state.trials.items() if trial.status is trial.status.ERROR]
        for trial_id in failed[:_MOST_SHOWN_TRIALS]:
            if sys.stderr.isatty():  # a table shows no reasons
                warn(f"Trial {trial_id}: {state.trials[trial_id].reason}")
            warn(f"Log of trial {trial_id}: {_command('logs', directory.path, trial_id)}")
        warn(f"After a fix in {directory.code}, resume with: {_command('resume', directory.path, '--retry-failed')}")
        raise typer.Exit(1)


def _command(*arguments: object) -> str:
    """Return a command for an experiment, quoted for a shell."""
    return shlex.join(["det-lightning", "experiment", *map(str, arguments)])
