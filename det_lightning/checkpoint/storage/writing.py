"""Writing checkpoints in order, at once or in the background: the files, then ``metadata.json`` with the manifest.

Change here: an entry of every ``metadata.json`` is written in ``complete``; ``add_metric`` in
``checkpoint/retention/trial_checkpoints.py`` adds one later.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pathlib
import pickle
import shutil
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

import torch

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import MANIFEST_KEY, describe_files, with_checksum
from det_lightning.checkpoint.format.resume_state import SPELLED, read_settings
from det_lightning.checkpoint.format.standard_values import list_slots, save_state
from det_lightning.checkpoint.storage.location import Location, new_id
from det_lightning.checkpoint.storage.staging import StagingDirectory, open_staging
from det_lightning.escaping import get_logger
from det_lightning.files.plain_values import MOST_IN_SETTINGS, NotPlainError, as_plain
from det_lightning.files.strict_json import spell_numbers, to_json
from det_lightning.parts_of_determined import REFERENCE_VERSION

logger = get_logger(__name__)

_Result = TypeVar("_Result")
_State = TypeVar("_State")

# Including what torch and pickle raise if a state cannot be written.
_WRITE_ERRORS = (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError)

#: Called with a staging directory once all files but the last are written.
ReportWritten = Callable[[pathlib.Path], None]


def write_files(
    staging: StagingDirectory, content: CheckpointContent, code: CodeCopier, report_written: ReportWritten | None = None
) -> None:
    """Write all files but ``metadata.json``; abandon the staging directory after a failure."""
    with _writing(staging):
        if content.is_sharded:  # other ranks upload before the end
            staging.announce()
        code.copy(staging.directory / layout.CODE_DIR, storage=staging.directory.parent)
        _write_files(content, staging.directory)
    if report_written is not None:
        with staging:
            report_written(staging.directory)


def complete(
    staging: StagingDirectory, content: CheckpointContent, code: CodeCopier, announce: ReportWritten | None = None
) -> str:
    """Write ``metadata.json`` with the manifest, and publish the checkpoint; return the id.

    Call ``announce`` with the directory before. Abandon the staging directory after a failure, except if the storage
    fails for good: then a complete copy stays.
    """
    directory = staging.directory
    with _writing(staging):
        if announce is not None:
            announce(directory)
        files = describe_files(directory, {**content.described, **code.descriptions})
        entries = {
            "determined_version": REFERENCE_VERSION,
            "steps_completed": content.trial_state.batches_trained,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
            "time": time.time(),
            **content.notes,
            MANIFEST_KEY: files,
        }
        names: Collection[str] = files
        if staging.root.is_local:
            # Flushing thousands of small files would take minutes; their checksums show a loss.
            names = files.keys() - code.descriptions.keys()
        if content.described:  # other ranks have uploaded what they wrote
            names = [name for name in names if (directory / name).exists()]
        staging.commit(with_checksum(entries), names)
    return directory.name


@contextlib.contextmanager
def _writing(staging: StagingDirectory) -> Iterator[None]:
    """Raise an error in writing a checkpoint as a ``CheckpointError``, and abandon the checkpoint after any error."""
    try:
        yield
    except BaseException as e:
        explained = _explain(e, staging.directory) if isinstance(e, _WRITE_ERRORS) else None
        if not staging.is_kept:
            staging.abandon()
        if explained is None:
            raise
        raise explained from e


def _explain(error: Exception, directory: pathlib.Path) -> errors.CheckpointError:
    reason = str(error)
    if isinstance(error, RuntimeError) and "inline_container" in reason:  # torch hides the system's error
        reason = f"torch.save() could not write all of a file, as on a full disk or beyond a quota ({error})"
    return errors.CheckpointError(f"Checkpoint {directory} cannot be written: {reason}.")


def _write_files(content: CheckpointContent, directory: pathlib.Path) -> None:
    """Write all files but ``metadata.json``; the first is ``load_data.json``, by which an incomplete one is known."""
    load_data = content.load_data or {}
    if not load_data.keys() >= layout.LOAD_DATA_ENTRIES:  # unknown ones are null
        load_data = {**layout.make_load_data(**read_settings(content.resume, load_data)), **load_data}
    try:
        text = json.dumps(load_data, allow_nan=False)
    except (TypeError, ValueError):  # there is something that JSON lacks
        text = _encode_load_data(load_data)
    (directory / layout.LOAD_DATA_FILE).write_text(text, encoding="utf-8")
    trial_state = dict(vars(content.trial_state))
    if not content.epochs_known:
        del trial_state["epochs_trained"]
    (directory / layout.TRIAL_STATE_FILE).write_bytes(pickle.dumps(trial_state))
    if content.resume is not None:
        save_state(vars(content.resume), directory / layout.RESUME_FILE)
    if content.lightning is not None:
        save_state(content.lightning, directory / layout.LIGHTNING_FILE)
    if content.is_sharded:
        (directory / layout.SHARDS_DIR).mkdir()
    save_state(content.state, directory / (layout.SHARDED_STATE_FILE if content.is_sharded else layout.STATE_FILE))
    if content.files is not None:
        for path in sorted(content.files.iterdir()):
            shutil.move(path, directory / path.name)
        content.files.rmdir()


def _encode_load_data(load_data: Mapping[str, Any]) -> str:
    """Return the text of ``load_data.json``; values that JSON cannot hold are left out, and named in a warning."""
    losses: list[str] = []
    places = list(load_data.get(SPELLED) or [])
    content = {}
    for name, value in load_data.items():
        if name == SPELLED:
            continue
        try:
            plain = as_plain(value, name, losses, MOST_IN_SETTINGS)
        except NotPlainError as e:
            losses.append(str(e).removesuffix("."))
        else:
            content[name] = spell_numbers(plain, name, places)
    if losses:
        logger.warning("The checkpoint cannot hold all values: %s.", "; ".join(losses))
    if places:
        content[SPELLED] = places
    return to_json(content)


# Writing in the background

#: When a loader's worker dies, torch raises an error in the handler of this signal, so wherever the main thread is: a
#: writer would take it for its own error. None on Windows.
WORKER_DIED: int | None = getattr(signal, "SIGCHLD", None)

# How long the handler of a signal may be delayed while the main thread waits for another thread.
_POLL_S = 0.05


@contextlib.contextmanager
def defer_signal(number: int | None) -> Iterator[None]:
    """Defer the handler of a signal that arrives inside the block until the block ends, even with an error.

    Only handlers in Python can raise: without such a handler, or outside the main thread, nothing is deferred.
    """
    handler: Any = None if number is None else signal.getsignal(number)
    if number is None or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def note(signum: int, frame: FrameType | None) -> None:
        arrived.append((signum, frame))

    try:
        signal.signal(number, note)
        yield
    finally:
        if signal.getsignal(number) is note:  # otherwise the block installed another handler
            signal.signal(number, handler)
        if arrived:
            handler(*arrived[0])


@contextlib.contextmanager
def defer_all_signals() -> Iterator[None]:
    """Defer the handlers of all signals, like :func:`defer_signal`; for short blocks."""
    with contextlib.ExitStack() as stack:
        for number in sorted(signal.valid_signals()):
            if callable(signal.getsignal(number)):
                stack.enter_context(defer_signal(number))
        yield


class BackgroundTask(Generic[_Result]):
    """Work that starts in a new thread with the construction; the process waits for the thread before exit.

    Construct and store a task while signals are deferred: otherwise the thread may run although the caller was
    interrupted before having the task. Both threads share only the end: an interrupted main thread could leave a common
    lock locked.
    """

    def __init__(self, work: Callable[[], _Result], name: str) -> None:
        self._result: _Result
        self._error: BaseException | None = None
        self.is_done = False
        self._thread = threading.Thread(target=self._run, args=[work], name=name)
        self._thread.start()

    def _run(self, work: Callable[[], _Result]) -> None:
        try:
            self._result = work()
        except BaseException as e:  # raised by result()
            self._error = e
        self.is_done = True

    def wait(self) -> None:
        """Wait until the thread has ended. An interrupted wait can be repeated."""
        # Before Python 3.13, an interrupted join() may mark a running thread as ended.
        while not self.is_done:
            with defer_all_signals():
                self._thread.join(_POLL_S)
        with defer_all_signals():
            self._thread.join()

    def result(self) -> _Result:
        """Wait; return the result of the work, or raise the error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CheckpointQueue:
    """Writes checkpoints below the ``root`` of a storage, in order.

    If ``in_background``, a call copies the state, and another thread writes the copy.
    The next call raises an error from the background, once.
    """

    def __init__(self, root: Location, code: CodeCopier | None = None, in_background: bool = False) -> None:
        self._root = root
        self._code = code or CodeCopier()
        self._in_background = in_background
        self._under_way: BackgroundTask[str] | None = None
        self._complete: list[str] = []  # ids that take_complete() has not returned yet
        self._copier = StateCopier()

    def write(
        self,
        content: CheckpointContent,
        checkpoint_id: str | None = None,
        report_written: ReportWritten | None = None,
        before: ReportWritten | None = None,
        after: Callable[[], object] | None = None,
    ) -> str:
        """Write a checkpoint once the previous checkpoint is complete, or start writing; return the id.

        With ``report_written``, which may look at the trial, only the last file and the upload are left to the
        background. ``before`` is called with the directory before the checkpoint becomes complete, ``after`` once it
        is, both by the thread that writes.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
            RuntimeError: a loader's worker died meanwhile; the checkpoint is written nevertheless.
        """
        if self._under_way is not None:
            self.wait()
        new = checkpoint_id or new_id()

        def finish(staging: StagingDirectory | None = None) -> str:
            if staging is None:
                staging = open_staging(self._root, new)
                write_files(staging, content, self._code)
            complete(staging, content, self._code, before)
            if after is not None:
                after()
            return new

        with defer_signal(WORKER_DIED):
            if self._in_background and report_written is None:
                content = self._copy(content, new)
                work = finish
            else:
                staging = open_staging(self._root, new)
                write_files(staging, content, self._code, report_written)
                work = functools.partial(finish, staging)
            if self._in_background:
                with defer_all_signals():
                    self._under_way = BackgroundTask(work, name="checkpoint")
            else:
                self._complete.append(work())
        return new

    def is_under_way(self) -> bool:
        """Return whether a checkpoint is being written in the background."""
        return self._under_way is not None and not self._under_way.is_done

    def wait(self) -> None:
        """Wait for the checkpoint under way; raise any error."""
        if (under_way := self._under_way) is not None:
            under_way.wait()  # if this is interrupted, it stays under way
            with defer_all_signals():
                self._under_way = None
                self._complete.append(under_way.result())

    def take_complete(self, wait: bool = False) -> list[str]:
        """Return the ids of the checkpoints that became complete since the last call, or raise an error of one.

        If ``wait``, wait for the checkpoint under way.
        """
        if self._under_way is not None and (wait or self._under_way.is_done):
            self.wait()
        complete = self._complete
        self._complete = []
        return complete

    def forget(self) -> None:
        """Wait for the checkpoint that an interrupted run has left under way, and drop its id."""
        try:
            self.take_complete(wait=True)
        except errors.CheckpointError as e:
            logger.warning("A checkpoint of an earlier run cannot be written: %s", e)

    def _copy(self, content: CheckpointContent, checkpoint_id: str) -> CheckpointContent:
        try:
            return self._copier.copy(content, content.copies)
        except (RuntimeError, pickle.PicklingError, AttributeError, TypeError) as e:
            raise errors.CheckpointError(
                f"Checkpoint {checkpoint_id} cannot be written: its state cannot be copied: {e}."
            ) from e


class StateCopier:
    """Copies states to main memory, each over the previous copy, so that a copy is valid until the next.

    Copying into new memory takes several times as long. Memory for states on a GPU is pinned.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)

    def copy(self, state: _State, leave: Collection[torch.Tensor] = ()) -> _State:
        """Return a copy of ``state``: nested containers, tensors, and anything that can be deep-copied.

        Tensors that share memory also share memory in the copy, except sparse, quantized and lazily conjugated tensors
        and tensors of other classes. The tensors in ``leave`` are not copied.
        """
        free, self._free = self._free, defaultdict(list)
        storages: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}
        memo: dict[int, Any] = {id(tensor): tensor for tensor in leave}  # deepcopy() takes copies from here
        for tensor in iterate_tensors(state):
            if id(tensor) in memo:
                continue
            if not _is_plain(tensor):
                memo[id(tensor)] = copy.deepcopy(tensor) if tensor.is_leaf else tensor.detach().clone().requires_grad_()
                continue
            source = tensor.untyped_storage()
            # Several memories may start at the same address, as numpy's views do.
            key = (tensor.device, source.data_ptr(), source.nbytes())
            if key not in storages:
                storages[key] = self._copy_storage(source, free)
            target = torch.empty(0, dtype=tensor.dtype).set_(
                storages[key], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            is_parameter = type(tensor) is torch.nn.Parameter
            memo[id(tensor)] = torch.nn.Parameter(target, False) if is_parameter else target
            memo[id(tensor)].requires_grad_(tensor.requires_grad)
        return copy.deepcopy(state, memo)

    def _copy_storage(
        self, source: torch.UntypedStorage, free: dict[tuple[int, bool], list[torch.Tensor]]
    ) -> torch.UntypedStorage:
        nbytes, pinned = kind = source.nbytes(), source.device.type != "cpu"
        target = free[kind].pop() if free[kind] else torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._free[kind].append(target)
        target.copy_(torch.empty(0, dtype=torch.uint8, device=source.device).set_(source))
        return target.untyped_storage()


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and attributes, as of a checkpoint's content."""
    seen: set[int] = set()
    left = [value]
    for one in left:  # more is appended meanwhile
        if isinstance(one, torch.Tensor):
            yield one
        elif not isinstance(one, (int, float, str)) and id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, dict):
                left += one.values()
            elif isinstance(one, list | tuple | set | frozenset | deque):
                left += one
            if isinstance(attributes := getattr(one, "__dict__", None), dict) and not isinstance(one, ModuleType):
                left.append(attributes)
            left += [getattr(one, name, None) for name in list_slots(type(one))]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has nothing beyond type, size, stride and memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not vars(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > 0
    )
