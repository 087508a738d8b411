"""The loaders of a run: training data repeat without end, resume at the exact batch, and are divided into epochs."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from det_lightning import errors
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.engine.boundary import RunOptions
from det_lightning.engine.loaders import RunLoader, ShownLoader, SideStream, copy_aside
from det_lightning.engine.train_and_evaluate import overrides
from det_lightning.escaping import get_logger
from det_lightning.pytorch._data import DataLoader, move
from det_lightning.pytorch._position import GlobalBatch, TrainingPosition, continue_batches
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial
from det_lightning.pytorch._random_state import PassJournal, SamplerStates, Stateful, isolated_rng

logger = get_logger(__name__)


class LoaderFactory:
    """Builds the loaders of a run by the methods of the trial."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.trial = trial
        self.context = context

    def repeat(self, loader: Any) -> Any:
        """Return training data without end, from the position of the run on.

        The trial repeats its own data, unless they know their position.
        """
        parts = find_stateful(loader)
        return RepeatingLoader(loader, self.context.position, parts) if parts else loader

    def arrange(self, shown: ShownLoader, method: str) -> Any:
        """Return the data of a method of the module, such as ``train_dataloader``, as callbacks see them."""
        return shown

    def build_training(self, overfit_batches: float | None = None) -> Any:
        """Return the training loader; for ``overfit_batches`` a ``DataLoader``, or raise an UnsupportedTrainerFlags."""
        loader = self.take_training()
        if overfit_batches is not None and not isinstance(loader, DataLoader):
            raise errors.UnsupportedTrainerFlags(
                f"overfit_batches={overfit_batches} needs a det_lightning.pytorch.DataLoader, or for data of a call a "
                f"torch.utils.data.DataLoader over a map-style dataset; the training data are a "
                f"{type(loader).__module__}.{type(loader).__name__}. Train on a subset of the data instead."
            )
        return loader

    def take_training(self) -> Any:
        """Return the training loader of the trial."""
        return self._require_allowed("build_training_data_loader", self.trial.build_training_data_loader())

    def build_validation(self) -> Any:
        """Return the validation loader."""
        return self._require_allowed("build_validation_data_loader", self.trial.build_validation_data_loader())

    def _require_allowed(self, method: str, loader: Any) -> Any:
        if self.context.experimental.reproducibility_checks and not isinstance(loader, DataLoader):
            raise RuntimeError(
                f"{method}() returned a {type(loader).__module__}.{type(loader).__name__}, which is not repeated, "
                "sharded and resumed for you. Return a det_lightning.pytorch.DataLoader, which takes the same "
                "arguments; or repeat, shard and resume the data yourself, and call "
                "context.experimental.disable_dataset_reproducibility_checks() in the trial's __init__."
            )
        return loader


class TrialData:
    """The loaders of a trial, for the ranks and the position of a run; sets the length of an epoch.

    With ``sharded_validation`` each rank validates on a share of the data; otherwise the chief validates on all data.
    ``has_validated`` says whether the run had validated before an interruption.

    Attributes:
        journal: how the passes over the training data began.
        global_batch: how batches are divided among ranks; None if the trial divides its data itself.
        epoch_len: number of batches in an epoch.
        training, validation: the data that the run draws from.
        shown_training, shown_validation: the same for callbacks.
        prepare_batch: moves and casts a batch.
        prepare: the same for an iterator of training batches, perhaps copied to a GPU ahead of time.
    """

    def __init__(
        self,
        loaders: LoaderFactory,
        context: PyTorchTrialContext,
        sharded_validation: bool,
        options: RunOptions,
        has_validated: bool = False,
    ) -> None:
        self._context = context
        self._replicas = context.distributed.size
        self._rank = context.distributed.rank
        self._resumed = options.resumed
        self.global_batch: GlobalBatch | None = None
        self._passes: RepeatingLoader | None = None
        journal, self._resumed_at = read_journal(options.resumed, self._rank, self._replicas)
        self.journal = PassJournal(journal, position=self._resumed_at.get("training"))
        limit = options.epoch_limit
        loader = loaders.build_training(limit if options.overfits else None)
        # Lightning applies overfit_batches to the length of the loader, and so must see the number of all batches.
        unlimited = None
        shown = loader
        if options.overfits:
            shown = _without_shuffling(loader)
            unlimited = math.ceil(len(loader.batch_sampler) / self._replicas)
            loader = _select_first_batches(shown, limit, self._replicas)
            limit = 1.0
        is_ours = isinstance(loader, DataLoader) and loader.copies_aside(context.device)
        copies_aside = is_ours and context.experimental.auto_to_device
        training = self._resume_training(loaders, loader, copies_aside)
        length: int | None = context.distributed.broadcast(length_or_none(training))
        self.epoch_len = _limit(length or sys.maxsize, limit)
        if self.epoch_len == 0 and limit > 0:
            raise _less_than_one_batch(f"limit_train_batches={limit}", length)
        context.position.epoch_len = self.epoch_len
        self.training = RunLoader(training)
        # The loader of another rank may have one batch fewer, and then begins the next pass before the epoch ends.
        training_view = ShownLoader(shown, unlimited or length, self._replicas, self._rank)
        self.shown_training = loaders.arrange(training_view, "train_dataloader")
        validation, validation_view = self._share_validation(loaders.build_validation(), sharded_validation)
        if has_validated:
            _begin_workers_without_drawing(validation)
        self.journal.validation_samplers = SamplerStates(
            # The seed of the workers is drawn from the loader's own generator.
            types.SimpleNamespace(generator=getattr(validation, "generator", None)),
            getattr(validation, "batch_sampler", None),
        )
        # A validation must not move the training data.
        trained: list[int] = [] if self._passes is None else [id(part) for part in self._passes.parts]
        continued = [part for part in _find_continued(validation) if id(part) not in trained]
        self.validation = RunLoader(validation, continued)
        self.shown_validation = loaders.arrange(validation_view, "val_dataloader")
        self._views = [(self.training, training_view), (self.validation, validation_view)]
        self.prepare_batch = self._make_preparation()
        self.prepare: Callable[[Iterator[Any]], Iterator[Any]] = functools.partial(map, self.prepare_batch)
        if copies_aside:
            self.prepare = functools.partial(copy_aside, move=self.prepare_batch, stream=SideStream(context.device))

    def restore_validation(self) -> None:
        """Give the samplers of the validation their states from the interrupted run."""
        if "validation" in self._resumed_at:
            self.journal.validation_samplers.restore(self._resumed_at["validation"])

    def close(self, trained: int) -> None:
        """End the workers of both loaders; drop a loader that ends its own. Keep the state for later checkpoints."""
        if self._passes is not None:
            self._passes.state_dict(trained)
        for source, view in self._views:
            source.close()
            if source.loader is None:
                view.drop()

    def run_out_validation(self, taken: int) -> None:
        """Exhaust the iterator once all batches are ``taken``: samplers may draw random numbers at the end."""
        if taken == length_or_none(self.validation.loader):
            next(self.validation.batches, None)

    def _make_preparation(self) -> Callable[[Any], Any]:
        context = self._context
        to_device: Callable[[Any], Any] = context.to_device
        if not context.experimental.auto_to_device:
            to_device = lambda batch: batch  # noqa: E731
        elif not overrides(context, PyTorchTrialContext, "to_device"):  # a call less for each batch
            to_device = functools.partial(move, context.device, context.warned_types)
        cast = context.precision.whole_models.batch_cast()
        return to_device if cast is None else lambda batch: cast(to_device(batch))

    def _resume_training(self, loaders: LoaderFactory, loader: Any, copies_aside: bool) -> Any:
        # Counts the batches of all ranks: a rank with an empty share of a pass gets a batch in a later pass.
        if length_or_none(loader) == 0:
            raise RuntimeError(
                "The training loader is empty: its dataset has no samples, or fewer than one batch with "
                "drop_last=True. See build_training_data_loader()."
            )
        if not isinstance(loader, DataLoader):
            return self._continue_passes(loaders.repeat(loader))
        self.global_batch = self._choose_global_batch(loader.batch_sampler)
        self.journal.ranks = self.global_batch.ranks
        if self.global_batch.ranks != self._replicas:
            loader = copy.copy(loader)  # the trial may return the same loader for another run
            loader.batch_sampler = self.global_batch.resize(loader.batch_sampler)
        initial_batch = self._context.position.initial_batch
        shares = {"num_replicas": self._replicas, "rank": self._rank}
        resumable = loader.get_resumable_loader(self.journal, initial_batch, **shares, pins=copies_aside)
        parts = find_stateful(resumable, is_positioned=True)
        if not parts:
            return resumable
        return self._continue_passes(RepeatingLoader(resumable, self._context.position, parts))

    def _continue_passes(self, loader: Any) -> Any:
        if isinstance(loader, RepeatingLoader):
            self._passes = loader
            self.journal.ask_data = loader.state_dict
            if self._resumed is not None and self._resumed.resume is not None and "data" in self._resumed_at:
                before = self._resumed.resume.world_size
                loader.resume(adapt_data_state(self._resumed_at["data"], before, self._replicas))
        elif self._rank == 0:
            warn_of_own_data(self._resumed, loader, self._replicas)
        return loader

    def _choose_global_batch(self, batch_sampler: Any) -> GlobalBatch:
        size = (self._context.settings.hparams or {}).get("global_batch_size") or None
        now = GlobalBatch.measure(batch_sampler, self._replicas, size)
        if self._resumed is None:
            return now
        chosen, follows_order = continue_batches(self._resumed, batch_sampler, now, warns=self._rank == 0)
        if not follows_order:
            self.journal.forget()
        self._context.position.initial_batch = self._resumed.trial_state.batches_trained
        return chosen

    def _share_validation(self, loader: Any, sharded: bool) -> tuple[Any, ShownLoader]:
        replicas, rank = (self._replicas, self._rank) if sharded else (1, 0)
        share = loader
        if isinstance(loader, DataLoader):
            share = loader.get_data_loader(repeat=False, skip=0, num_replicas=replicas, rank=rank)
        return share, ShownLoader(loader, length_or_none(share), replicas, rank)

    def has_even_validation(self) -> bool:
        """Return whether all ranks validate on the same number of batches; all ranks must call it."""
        lengths = self._context.distributed.allgather(length_or_none(self.validation.loader))
        return None not in lengths and len(set(lengths)) == 1


class RepeatingLoader:
    """Repeats a loader whose ``parts`` know their position, and collects their state for checkpoints.

    Samplers are told the number of each pass. A resumed run without a state in the checkpoint leaves the position to
    the trial, or with ``skips`` leaves out the batches of the interrupted pass.
    """

    def __init__(
        self,
        loader: Any,
        position: TrainingPosition,
        parts: list[Any],
        *,
        skips: bool = False,
    ) -> None:
        self.parts = parts
        self._loader = loader
        self._source = RunLoader(loader)
        self._position = position
        self._skips = skips
        self._length = length_or_none(loader) or None
        self._drawn: int | None = None  # batches over the whole run, once the passes have begun
        # The latest states of the parts, and the batch before which they were asked for.
        self._states: list[Any] | None = None if position.initial_batch else []
        self._asked_at = 0

    def resume(self, saved: dict[str, Any]) -> None:
        """Begin with the state in a checkpoint; raise an InvalidCheckpointException if it belongs to other data."""
        if len(saved["states"]) not in (0, len(self.parts)):
            raise errors.InvalidCheckpointException(
                f"The checkpoint holds the state of {len(saved['states'])} part(s) of the training data, and "
                f"{len(self.parts)} have a state_dict(): {', '.join(type(part).__name__ for part in self.parts)}. "
                "Resume with the same kind of loader."
            )
        # Earlier checkpoints may have states from before the batch that was under way.
        self._states, self._asked_at = saved["states"], self._position.initial_batch - saved["behind"]

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        first = self._position.initial_batch
        # The interrupted run has drawn the random numbers for the beginning of the pass.
        with isolated_rng() if first else contextlib.nullcontext():
            self._drawn = drawn = self._load(first)
            batches = self._repeat(self._begin(drawn), drawn)
            for _ in range(first - drawn):
                next(batches)
        return batches

    def _load(self, first: int) -> int:
        """Load the states from the checkpoint; return the number of the batch that follows, at most ``first``."""
        if self._states is not None:
            # A part may go on using what it has loaded.
            for part, state in zip(self.parts, copy.deepcopy(self._states), strict=False):
                part.load_state_dict(state)
            return self._asked_at
        skipped = first % (self._length or sys.maxsize) if self._skips else 0
        if self._skips:
            logger.warning(
                "The checkpoint has no position of the training data, which are of type %s: the run resumes after "
                "batch %d of a new pass. An exact resume needs a torch.utils.data.DataLoader over a map-style dataset, "
                "or data with state_dict() and load_state_dict().",
                *(type(self._loader).__name__, skipped),
            )
        return first - skipped

    def _begin(self, drawn: int) -> Iterator[Any]:
        loader = self._loader
        if not isinstance(loader, torch.utils.data.DataLoader):
            return self._source.begin()
        for sampler in list_told(loader):
            sampler.set_epoch(drawn // (self._length or self._position.epoch_length()))
        # Torch draws a seed for workers, even if there are none, and where a pass ends may be seen only after a resume.
        if not (self.parts and drawn) or loader.num_workers or loader.generator:
            return self._source.begin()
        loader.generator = torch.Generator()
        try:
            return self._source.begin()
        finally:
            loader.generator = None

    def _repeat(self, batches: Iterator[Any], drawn: int) -> Iterator[Any]:
        has_no_epochs = self._skips and self._length is None and self._position.epoch_length() == sys.maxsize
        may_be_empty = drawn > 0  # the interrupted run may have read all batches of the pass
        while True:
            begin = drawn
            for batch in batches:
                self._drawn = drawn = drawn + 1
                yield batch
            if has_no_epochs or (drawn == begin and not may_be_empty):
                raise RuntimeError(
                    f"The training data, a {type(self._loader).__name__} without a length, end after {drawn - begin} "
                    "batches: give the data a __len__, or pass limit_train_batches=n, the length of an epoch."
                )
            may_be_empty = False
            batches = self._begin(drawn)

    def state_dict(self, trained: int) -> dict[str, Any] | None:
        """Return the state before batch ``trained``, the next one to train; None if it is unknown."""
        if not self.parts:
            return None
        if self._drawn == trained and (self._states is None or self._asked_at != trained):
            # Copies, because the data change their state as they go on.
            self._states, self._asked_at = [copy.deepcopy(part.state_dict()) for part in self.parts], trained
        if self._states is None:
            return None
        if self._asked_at != trained:
            logger.warning("The checkpoint lacks the state of the training data: it was written during a batch.")
            return None
        is_start = trained % (self._position.epoch_length() or 1) == 0
        return {"states": self._states, "behind": 0, "epoch_start": is_start}


def find_stateful(loader: Any, *, is_positioned: bool = False) -> list[Stateful]:
    """Return the parts that know the position: the loader itself, or else its dataset and samplers.

    The dataset alone is enough if the loader ``is_positioned``. Warn of states that workers have.
    """
    if isinstance(loader, Stateful):
        return [loader]
    if not isinstance(loader, torch.utils.data.DataLoader):
        return []
    samplers: list[Any] = [] if is_positioned else [loader.batch_sampler, loader.sampler]
    parts = [part for part in samplers if isinstance(part, Stateful)]
    if isinstance(loader.dataset, Stateful) and (parts or is_positioned or isinstance(loader.dataset, IterableDataset)):
        parts.append(loader.dataset)
    if parts and loader.num_workers:
        logger.warning(
            "%s has a state_dict(), which checkpoints cannot hold, since the loader's workers are ahead of training. "
            "Use torchdata's StatefulDataLoader, or num_workers=0.",
            type(parts[0]).__name__,
        )
        return []
    return parts


def _find_continued(loader: Any) -> list[Stateful]:
    """Return the part of a loader, if any, whose next iterator continues where the last one stopped."""
    part = loader
    if isinstance(loader, torch.utils.data.DataLoader):
        reads_here = isinstance(loader.dataset, IterableDataset) and not loader.num_workers
        part = loader.dataset if reads_here else None
    return [part] if isinstance(part, Stateful) else []


def list_samplers(loader: Any) -> list[Any]:
    """Return the samplers of a loader of torch."""
    batches = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]


def list_told(loader: Any) -> list[Any]:
    """Return the samplers of a loader whose ``set_epoch()`` Lightning calls."""
    return [one for one in list_samplers(loader) if callable(getattr(one, "set_epoch", None))]


def length_or_none(loader: Any) -> int | None:
    """Return the length of a loader, or None for a loader without a length, for example over an iterable dataset."""
    try:
        return len(loader)
    except TypeError:
        return None


def _begin_workers_without_drawing(loader: Any) -> None:
    """Start persistent workers without drawing their seed, which the interrupted run has already drawn.

    Without a generator, the loader would draw the seed from the global random state.
    """
    if getattr(loader, "persistent_workers", False) and loader.generator is None:
        loader.generator = torch.Generator()


def _limit(length: int, limit: float) -> int:
    if isinstance(limit, int):
        return min(length, limit)
    return length if limit == 1.0 else int(length * limit)


def read_journal(
    content: CheckpointContent | None, rank: int, ranks: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return how a rank's passes over the training data began, and the positions of the loaders; empty if unknown.

    If another number of ranks wrote the checkpoint, all ranks get those of the chief, and so share one order.
    """
    if content is None or content.resume is None:
        return [], {}
    resume = content.resume
    writer = rank if resume.world_size == ranks else 0
    return list(resume.journals[writer]), resume.positions[writer] if resume.positions else {}


def adapt_data_state(state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """Return a state of the training data for ``now`` ranks; ``before`` ranks wrote it.

    From the start of an epoch the data begin afresh; in the middle raise a CheckpointError.
    """
    if before == now:
        return state
    if not state["epoch_start"]:
        raise errors.CheckpointError(
            f"The checkpoint holds the state of the training data of {before} process(es) in the middle of an epoch, "
            f"which cannot be divided among {now} process(es). Resume with {before}, or from a checkpoint at the end "
            "of an epoch."
        )
    return {**state, "states": [], "behind": 0}


def warn_of_own_data(content: CheckpointContent | None, loader: Any, ranks: int) -> None:
    """Warn if other ranks than before continue with data that the trial divides among ranks itself."""
    if content is not None and content.resume is not None and content.resume.world_size != ranks:
        logger.warning(
            "The run resumes on %d process(es) after %d batches of %d: the trial divides its data, a %s, itself, and "
            "must continue after as many batches of all processes.",
            *(ranks, content.trial_state.batches_trained, content.resume.world_size, type(loader).__name__),
        )


def _less_than_one_batch(flag: str, length: int | None) -> errors.UnsupportedTrainerFlags:
    return errors.UnsupportedTrainerFlags(
        f"{flag} of the {length} training batches is less than one batch. Pass a larger share, or a number of batches."
    )


def _without_shuffling(loader: DataLoader) -> DataLoader:
    if not isinstance(loader.sampler, RandomSampler):
        return loader
    ordered = copy.copy(loader)  # the trial may return the same loader for another run
    ordered.sampler = SequentialSampler(cast("Sized", loader.dataset))
    batches = loader.batch_sampler
    ordered.batch_sampler = BatchSampler(ordered.sampler, batches.batch_size, batches.drop_last)
    return ordered


def _select_first_batches(loader: DataLoader, limit: float, replicas: int) -> DataLoader:
    """Return a loader of the first batches of ``loader`` for each of ``replicas`` ranks."""
    batches = loader.batch_sampler
    length = math.ceil(len(batches) / replicas)
    if _limit(length, limit) == 0:
        raise _less_than_one_batch(f"overfit_batches={limit}", length)
    first = copy.copy(loader)
    first.batch_sampler = FirstBatches(batches, replicas * _limit(length, limit))
    return first


class FirstBatches(BatchSampler):
    """Yields the first ``count`` batches of ``batch_sampler``."""

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self.batch_sampler = batch_sampler
        self.count = count

    def __len__(self) -> int:
        return min(self.count, len(self.batch_sampler))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batch_sampler, self.count)
