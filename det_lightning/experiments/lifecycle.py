"""Creates, runs and resumes an experiment: gives the search, the launcher and the runner their settings."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from det_lightning import errors
from det_lightning.checkpoint.retention.policy import CheckpointRecord, Retention
from det_lightning.config import ExperimentConfig
from det_lightning.experiments.checkpoint_lookup import CheckpointLookup
from det_lightning.experiments.code_check import check_code
from det_lightning.experiments.directory import ExperimentDirectory, Options, read_storage
from det_lightning.experiments.event_log import EventLog
from det_lightning.experiments.launcher import Demand, Launcher
from det_lightning.experiments.local import LocalLauncher
from det_lightning.experiments.model_context import copy_model_context
from det_lightning.experiments.runner import ExperimentRunner
from det_lightning.experiments.search.operations import ExitReason
from det_lightning.experiments.search.search import Search
from det_lightning.experiments.state import ExperimentState
from det_lightning.experiments.warm_start import find_source
from det_lightning.files.local_files import make_private, write_private
from det_lightning.files.strict_json import to_json
from det_lightning.missing_parts import how_to_install
from det_lightning.startup_hook import STARTUP_HOOK

Show = Callable[[ExperimentState], None]


def make_demand(config: ExperimentConfig, options: Options) -> Demand:
    """Return the devices that the trials of an experiment need."""
    slots_per_trial = config.resources.slots_per_trial if options.slots is None else options.slots
    return Demand(slots_per_trial, config.resources.max_slots, options.cpu)


@contextlib.contextmanager
def find_launcher(ray_address: str | None) -> Iterator[type[Launcher]]:
    """Yield the launcher for trials: on this machine or, while the block runs, on the Ray cluster at an address."""
    if ray_address is None:
        yield LocalLauncher
        return
    try:
        from det_lightning.experiments.ray_cluster import connect
        from det_lightning.experiments.ray_launcher import RayLauncher
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise errors.ExperimentError(f"Running trials on Ray needs ray: {how_to_install('ray')}.") from error
    with connect(ray_address):
        yield RayLauncher


def create(
    config: ExperimentConfig,
    source: Path | None,
    code: Path,
    parent: Path,
    options: Options,
    *,
    with_hook: bool = True,
) -> ExperimentDirectory:
    """Create the files of a new experiment in a directory below ``parent``, with copies of ``source`` and ``code``.

    Without ``with_hook``, the copy of the code has no start-up hook. Raise an ExperimentError if the code or a logger
    cannot be used, or if the checkpoint to start from does not exist.
    """
    require_loggers(options.loggers)
    check_code(config, code, "the configuration" if source is None else str(source))
    checkpoint = find_source(config.searcher.source_checkpoint_uuid, read_storage(config.as_dict()), parent)
    directory = ExperimentDirectory.create(parent, config.name)
    try:
        copy_model_context(code, directory.code)
        if not with_hook:
            (directory.code / STARTUP_HOOK).unlink(missing_ok=True)
        if source is not None:
            write_private(directory.given_config, source.read_bytes())
        write_private(directory.config_file, to_json(config.as_dict(), indent=1))
        directory.write_options(options.model_copy(update={"source_checkpoint": checkpoint}))
        write_private(directory.events, "")
    except BaseException:
        shutil.rmtree(directory.path)
        raise
    return directory


def run(
    directory: ExperimentDirectory,
    config: ExperimentConfig,
    show: Show,
    launcher_class: type[Launcher],
    options: Options,
    *,
    retry_failed: bool = False,
) -> ExitReason | None:
    """Run an experiment from its current state to its end; return the outcome, or None after a signal to pause.

    ``config`` is the experiment's, and ``launcher_class`` belongs to the options. With ``retry_failed``, trials that
    ended with an error go on.
    """
    require_loggers(options.loggers)
    make_private(directory.files_with_settings())
    log = EventLog(directory.events)
    try:
        directory.write_options(options)
        searcher = config.searcher.model_copy(update={"name": "single"}) if options.tries else config.searcher
        state = ExperimentState(searcher.metric or "", searcher.smaller_is_better, log.events)
        search = Search(searcher, config.hyperparameters, config.reproducibility.experiment_seed)
        launcher = launcher_class(directory, config.as_dict(), options, make_demand(config, options))
        max_restarts = None if options.tries else config.max_restarts
        runner = ExperimentRunner(log, search, state, launcher, max_restarts, show)
        with _handle_signals(runner):
            outcome = runner.run(retry_failed=retry_failed)
            if outcome is None:
                runner.state.pause_queued()
            elif options.tries:
                _delete_all(directory, runner)
            else:
                _clean_up(directory, runner, launcher.checkpoints)
        show(runner.state)
        return outcome
    finally:
        log.close()


def _delete_all(directory: ExperimentDirectory, runner: ExperimentRunner) -> None:
    """Delete the checkpoints of a smoke run, which are in the experiment's own directory."""
    for trial in runner.state.trials.values():
        for checkpoint_id in list(trial.checkpoints):
            runner.record("checkpoint_deleted", trial=trial.trial_id, checkpoint_id=checkpoint_id)
    shutil.rmtree(directory.checkpoints, ignore_errors=True)


def _clean_up(directory: ExperimentDirectory, runner: ExperimentRunner, lookup: CheckpointLookup) -> None:
    """Report and delete the checkpoints still to be deleted; a failed deletion leaves the experiment complete."""
    try:
        for trial in runner.state.trials.values():
            runner.report_complete(trial)
        for trial_id, checkpoint_id in delete_checkpoints(directory, runner.state, lookup):
            runner.record("checkpoint_deleted", trial=trial_id, checkpoint_id=checkpoint_id)
    except errors.CheckpointError as error:
        runner.record("message", text=f"Not all checkpoints that need not be kept were deleted: {error}")


@contextlib.contextmanager
def _handle_signals(runner: ExperimentRunner) -> Iterator[None]:
    """Let the first signal pause the experiment, and any further signal end it at once."""
    reactions = itertools.chain([runner.pause], itertools.repeat(runner.kill))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: next(reactions)()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def delete_checkpoints(
    directory: ExperimentDirectory, state: ExperimentState, lookup: CheckpointLookup
) -> Iterator[tuple[int, str]]:
    """Delete the checkpoints beyond ``save_experiment_best`` and the like; yield trial and id of each deleted one.

    Checkpoints that are already gone do not count as kept, and are yielded too.
    """
    retention = Retention.from_config(directory.config["checkpoint_storage"])
    everything = (found for trial in state.trials.values() for found in trial.checkpoints.values())
    known = {found.checkpoint_id: found for found in everything if found.storage is None}
    if retention is None or not known:
        return
    with lookup.environment():
        storage = lookup.open()
        if not (existing := lookup.find_existing(known.values())):
            raise errors.StorageError(f"{storage} has none of the {len(known)} checkpoints, so nothing was deleted.")
        records = [
            CheckpointRecord(id_, str(found.trial_id), found.steps_completed, found.time, state.metric_at(found))
            for id_, found in known.items()
            if id_ in existing
        ]
        chosen = retention.choose_to_delete(records, state.smaller_is_better)
        # The rest of a checkpoint whose removal was interrupted goes, too.
        for checkpoint_id in [*chosen, *(id_ for id_ in known if id_ not in existing)]:
            with contextlib.suppress(errors.CheckpointNotFound):
                storage.delete(checkpoint_id)
            yield known[checkpoint_id].trial_id, checkpoint_id


#: The additional package of each logger.
PACKAGES = {"csv": None, "tensorboard": None, "mlflow": "mlflow", "wandb": "wandb"}


def require_loggers(names: Sequence[str]) -> None:
    """Raise an ExperimentError that names all loggers with an unknown name or a missing package."""
    mistakes = [f"--logger {name}: must be one of {', '.join(PACKAGES)}" for name in names if name not in PACKAGES]
    packages = {name: package for name in names if (package := PACKAGES.get(name)) is not None}
    missing = {name: package for name, package in packages.items() if importlib.util.find_spec(package) is None}
    mistakes += [f"--logger {name}: needs a package; pip install {package}" for name, package in missing.items()]
    if mistakes:
        raise errors.ExperimentError("; ".join(mistakes) + ".")
