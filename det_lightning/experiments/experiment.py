"""Creates, runs and resumes an experiment."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from det_lightning import errors
from det_lightning.config import ExperimentConfig, read_config
from det_lightning.experiments.best_validations import BestValidations
from det_lightning.experiments.cleanup import delete_checkpoints
from det_lightning.experiments.directory import ExperimentDirectory, Placement, storage_named_in
from det_lightning.experiments.event_log import EventLog
from det_lightning.experiments.local import LocalMachine
from det_lightning.experiments.loggers import require_loggers
from det_lightning.experiments.machines import Demand, Machines
from det_lightning.experiments.model_context import copy_model_context
from det_lightning.experiments.runner import ExperimentRunner
from det_lightning.experiments.search import CreateTrial, Outcome, Search, planned_trials
from det_lightning.experiments.search_settings import settings_of, space_of
from det_lightning.experiments.state import ExperimentState
from det_lightning.experiments.warm_start import find_source
from det_lightning.extras import how_to_install
from det_lightning.files.private_files import make_private, write_private
from det_lightning.files.strict_json import to_json
from det_lightning.startup_hook import STARTUP_HOOK

Show = Callable[[ExperimentState], None]


def planned(config: ExperimentConfig) -> list[CreateTrial]:
    """Return the trials that do not depend on results, in order of creation: all of them for random and grid."""
    return planned_trials(settings_of(config), space_of(config), config.reproducibility.experiment_seed)


def demand_of(config: ExperimentConfig, placement: Placement) -> Demand:
    """Return what the trials of an experiment need."""
    slots_per_trial = config.resources.slots_per_trial if placement.slots is None else placement.slots
    return Demand(slots_per_trial, config.resources.max_slots, placement.cpu)


@contextlib.contextmanager
def machines_at(ray_address: str | None) -> Iterator[Machines]:
    """Yield the machines for trials: this one or, while the block runs, those of the Ray cluster at an address."""
    if ray_address is None:
        yield LocalMachine()
        return
    try:
        from det_lightning.experiments.ray_cluster import connected
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise errors.ExperimentError(f"Ray is not installed: {how_to_install('ray')}.") from error
    with connected(ray_address) as cluster:
        yield cluster


def create(
    config: ExperimentConfig,
    source: Path | None,
    code: Path,
    parent: Path,
    loggers: Sequence[str] = (),
    *,
    trusted: bool = False,
    with_hook: bool = True,
) -> ExperimentDirectory:
    """Create the files of a new experiment in a directory below ``parent``, with copies of ``source`` and ``code``.

    Unless ``with_hook``, the copy of the code has no start-up hook. If ``trusted``, its trials unpickle anything in the
    checkpoints that they start from, whoever wrote those. Raises an ExperimentError if the code or a logger cannot be
    used, or the checkpoint to start from does not exist.
    """
    require_loggers(loggers)
    searcher = config.searcher
    source_checkpoint = find_source(searcher.source_checkpoint_uuid, storage_named_in(config.as_dict()), parent)
    directory = ExperimentDirectory.create(parent, config.name)
    try:
        copy_model_context(code, directory.code)
        if not with_hook:
            (directory.code / STARTUP_HOOK).unlink(missing_ok=True)
        if source is not None:
            write_private(directory.given_config, source.read_bytes())
        write_private(directory.config_file, to_json(config.as_dict(), indent=1))
        options = {"loggers": list(loggers), "source_checkpoint": source_checkpoint, "trusted": trusted}
        directory.write_options(options)
        write_private(directory.events, "")
    except BaseException:
        shutil.rmtree(directory.path)
        raise
    return directory


def run(
    directory: ExperimentDirectory,
    show: Show,
    machines: Machines,
    placement: Placement,
    *,
    retry_failed: bool = False,
) -> Outcome | None:
    """Run an experiment from its current state to its end, and return how it ended; None if a signal paused it.

    ``machines`` are those of the placement. With ``retry_failed``, trials that ended with an error go on.
    """
    config = read_config(directory.config())
    require_loggers(directory.loggers())
    make_private(directory.files_with_settings())
    log = EventLog(directory.events)
    try:
        directory.keep_placement(placement)
        searcher = config.searcher
        state = ExperimentState(searcher.metric or "", searcher.smaller_is_better, log.events)
        search = Search(settings_of(config), space_of(config), config.reproducibility.experiment_seed)
        demand = demand_of(config, placement)
        launcher = machines.launcher(directory, config.as_dict(), demand, directory.source_checkpoint())
        best = BestValidations(directory.best)

        def on_change(state: ExperimentState) -> None:
            best.publish(state)
            show(state)

        runner = ExperimentRunner(log, search, state, launcher, config.max_restarts, on_change)
        with _signals(runner):
            outcome = runner.run(retry_failed=retry_failed)
            if outcome is None:
                runner.state.pause_queued()
            else:
                _clean_up(directory, runner)
        show(runner.state)
        return outcome
    finally:
        log.close()


def _clean_up(directory: ExperimentDirectory, runner: ExperimentRunner) -> None:
    """Delete the checkpoints that need not be kept; if that fails, the experiment is complete anyway."""
    try:
        for trial_id, checkpoint_id in delete_checkpoints(directory, runner.state):
            runner.record("checkpoint_deleted", trial=trial_id, checkpoint_id=checkpoint_id)
    except errors.CheckpointError as error:
        runner.record("message", text=f"Not all checkpoints that need not be kept were deleted: {error}")


@contextlib.contextmanager
def _signals(runner: ExperimentRunner) -> Iterator[None]:
    """Let the first signal pause the experiment, and any further one end it at once."""
    seen: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            runner.pause()
        else:
            runner.kill()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
