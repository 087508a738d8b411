"""Ending a run in good order when the process is asked to go."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytorch_lightning as pl

from det_lightning.adapters.lightning_internals import exit_code_of
from det_lightning.callbacks.attaching import require_trial_module
from det_lightning.engine.signals import SAME_SIGNAL_S, end_by_signal, print_at_once
from det_lightning.engine.stopping import StopRequest
from det_lightning.errors import PREEMPTED_EXIT_CODE, Preempted

logger = logging.getLogger(__name__)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class PreemptionHandler(pl.Callback):
    """Saves a trial and ends the process when a scheduler asks it to go.

    A signal only sets a flag. At the next boundary, which is at the latest the next report, all ranks agree on it; they
    write a checkpoint, if nothing else has, and wait until it is complete. Then ``fit`` raises ``errors.Preempted``,
    which ends the process with ``exit_code`` unless it is caught. A single process does not wait for a boundary but
    ends after the batch that is under way, or the validation.

    A second signal ends the process at once. Handlers that were there before are called too, and are back after the
    fit. Before training starts there is nothing to save, so signals do what they did before.

    Args:
        signals: which signals ask the process to end; by default ``SIGTERM``, and ``SIGUSR1`` where there is one.
        exit_code: what the process ends with; not 0, which tells a scheduler that the job is done.

    Raises:
        ValueError: a signal cannot be handled or is that of Ctrl-C, or the code is no error code of a process.
    """

    def __init__(self, signals: Iterable[int] | None = None, exit_code: int = PREEMPTED_EXIT_CODE) -> None:
        self.signals = _checked(_default_signals() if signals is None else signals)
        if not 0 < exit_code < 256:
            raise ValueError(f"exit_code of a preempted process has to be from 1 to 255; got {exit_code}.")
        self.exit_code = exit_code
        self._stop_request = StopRequest(exit_code)
        self._first_signal_s: float | None = None
        self._before: dict[signal.Signals, _Handler] = {}
        self._process = os.getpid()
        self._installed = False

    @property
    def requested(self) -> bool:
        """Whether this process was asked to end."""
        return self._stop_request.requested

    def request(self) -> None:
        """Ask this process to end; for notices that are not signals, or where signals cannot be handled."""
        self._stop_request.requested = True

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Offer the module to tell when this process has to end.

        Raises:
            TypeError: the module is no :class:`TrialModule`.
        """
        module = require_trial_module(self, pl_module)
        if stage == "fit":
            self._stop_request.requested = False
            self._first_signal_s = None
            module.attach(stop_request=self._stop_request)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the handlers of the user; Lightning puts its own in their place after this."""
        self._before = {number: signal.getsignal(number) for number in self.signals}
        if require_trial_module(self, pl_module).checkpoint_plan is None:
            logger.warning("PreemptionHandler has nothing to save with: add a DeterminedCheckpoint to the callbacks.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle the signals, instead of Lightning, which would raise in the middle of a step.

        Raises:
            Preempted: SIGTERM has come since Lightning handles it, which would end the process with status 0.
        """
        if trainer.received_sigterm and trainer.world_size == 1:  # several ranks agree on it in Lightning's loop
            raise Preempted(exit_code_of(trainer, self.exit_code))
        if threading.current_thread() is not threading.main_thread():
            logger.info("Signals can only be handled in the main thread; call request() to end this run early.")
            return
        self._process = os.getpid()
        self._installed = True
        for number in self.signals:
            signal.signal(number, self._on_signal)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put back the handlers of the user."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Put back the handlers of the user."""
        self._restore()

    def _restore(self) -> None:
        if self._installed and threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                # None: a handler that Python did not install, and cannot put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._installed = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a fork, such as a process that the trial started, has inherited this
            end_by_signal(signum)
        elif self._first_signal_s is None:
            self._stop_request.requested = True
            self._first_signal_s = now
            name = signal.Signals(signum).name
            print_at_once(
                f"det_lightning: {name} has come; process {self._process} saves and ends at the next boundary.\n"
            )
            before = self._before.get(signal.Signals(signum))
            if callable(before):
                before(signum, frame)
        elif now - self._first_signal_s > SAME_SIGNAL_S:
            print_at_once(f"det_lightning: a second signal has come; process {self._process} ends at once.\n")
            end_by_signal(signum)


def _default_signals() -> list[int]:
    return [number for name in ("SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None]


def _checked(signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    numbers = tuple(signal.Signals(number) for number in signals)
    forbidden = {getattr(signal, name, None) for name in ("SIGINT", "SIGKILL", "SIGSTOP")}
    wrong = [number.name for number in numbers if number in forbidden]
    if wrong:
        raise ValueError(
            f"PreemptionHandler cannot take {', '.join(wrong)}: SIGINT is Ctrl-C, which ends a run at once, and "
            "SIGKILL and SIGSTOP reach no process."
        )
    return numbers
