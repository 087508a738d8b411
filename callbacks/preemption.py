"""Decides which signals save a run and end the process, with which status, and what Ctrl-C does.

Change here: which signals count, and the exit status; ``EndSignals`` in ``det_lightning/ranks/signals.py`` has the rule
for a first and a second signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from det_lightning.adapters.lightning_internals import choose_exit_code, reraise_keyboard_interrupt
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.module import TrialModule, require_trial_module
from det_lightning.arguments import refuse_texts, wrong_argument
from det_lightning.callbacks.checkpoint import DeterminedCheckpoint
from det_lightning.engine.boundary import StopRequest, end_without_traceback
from det_lightning.errors import PREEMPTED_EXIT_CODE, Preempted
from det_lightning.escaping import get_logger
from det_lightning.ranks.signals import EndSignals, print_at_once

logger = get_logger(__name__)


class PreemptionHandler(pl.Callback):
    """Saves a trial and ends the process when a scheduler sends a signal.

    A signal only sets a flag. At the next boundary, at the latest the next report, all ranks agree to end, write a
    checkpoint unless this batch has one, and wait until it is written. Then ``fit`` raises ``errors.Preempted``;
    uncaught, the error ends the process with ``exit_code``. A single process does not wait for a boundary, and ends
    after the current batch or validation.

    A second signal ends the process at once. Handlers installed before are called too, and restored after the fit.
    Until training starts there is nothing to save, and signals have their usual effect.

    Args:
        signals: the signals to handle; by default ``SIGTERM``, and ``SIGUSR1`` where it exists.
        exit_code: exit code of the process; not 0, because 0 tells a scheduler that the job is done.
        save_on_interrupt: handle Ctrl-C (``SIGINT``) too. Otherwise Ctrl-C ends a run at once, unsaved.

    Attributes:
        interrupted: whether Ctrl-C asked this process to end.

    Raises:
        ValueError: a signal cannot be handled or is ``SIGINT``, or ``exit_code`` is not from 1 to 255.

    Example:
        >>> import signal
        >>> from det_lightning.callbacks import PreemptionHandler
        >>> handler = PreemptionHandler(signals=[signal.SIGTERM], exit_code=3)

        Pass it in ``pl.Trainer(callbacks=[handler, checkpoints])``.
    """

    def __init__(
        self,
        signals: Iterable[int] | None = None,
        exit_code: int = PREEMPTED_EXIT_CODE,
        *,
        save_on_interrupt: bool = False,
    ) -> None:
        refuse_texts("PreemptionHandler()", save_on_interrupt=save_on_interrupt)
        self.signals = _check_signals(_default_signals() if signals is None else signals)
        if save_on_interrupt:
            self.signals += (signal.SIGINT,)
        if not 0 < exit_code < 256:
            raise ValueError(f"exit_code of a preempted process must be from 1 to 255; got {exit_code}.")
        self.exit_code = exit_code
        self._stop_request = StopRequest(exit_code)
        self._signals = EndSignals(self._on_first)
        self.interrupted = False

    @property
    def requested(self) -> bool:
        """Whether this process was asked to end."""
        return self._stop_request.requested

    def request(self) -> None:
        """Ask this process to end: for notices that are not signals, or where signals cannot be handled."""
        self._stop_request.requested = True

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the module with the request to stop, and forget earlier requests.

        Raises:
            TypeError: the module is not a ``TrialModule``.
        """
        module = require_trial_module(self, pl_module)
        if stage == "fit":
            self._stop_request.requested = False
            self.interrupted = False
            module.stop_request = self._stop_request

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Remember the user's handlers before Lightning replaces them."""
        self._signals.remember(self.signals)
        if pl_module.checkpoints is None:
            logger.warning("PreemptionHandler has nothing to save with: add a DeterminedCheckpoint to the callbacks.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Handle the signals in place of Lightning, which would end with status 0 after an earlier SIGTERM.

        Raises:
            Preempted: a rank has already received SIGTERM.
        """
        if any(pl_module.context.distributed.allgather(trainer.received_sigterm)):
            raise Preempted(choose_exit_code(trainer, self.exit_code))
        if not self._signals.install():
            logger.info("Signals can only be handled in the main thread; call request() to end this run early.")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the previous signal handlers."""
        self._signals.restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the previous signal handlers."""
        self._signals.restore()

    def _on_first(self, signum: int) -> None:
        self._stop_request.requested = True
        self.interrupted = signum == signal.SIGINT
        print_at_once(
            f"det_lightning: received {signal.Signals(signum).name}; process {os.getpid()} saves and ends at the next "
            "boundary.\n"
        )


@contextlib.contextmanager
def interrupts_in_one_line(
    module: TrialModule,
    checkpoints: DeterminedCheckpoint,
    preemption: PreemptionHandler,
    resumed_from: str | None,
) -> Iterator[None]:
    """After Ctrl-C raise a ``KeyboardInterrupt`` even though the run is saved, and log one line on what was saved."""
    try:
        with reraise_keyboard_interrupt():
            yield
    except KeyboardInterrupt as caught:
        interrupt = caught
    except Preempted:
        if not preemption.interrupted:
            raise
        interrupt = KeyboardInterrupt()
    else:
        return
    batches = 0 if module.driver is None else module.driver.run.state.batches_trained
    if module.context is None or module.context.distributed.rank == 0:
        logger.warning("Interrupted after %d batches. %s", batches, checkpoints.describe_saved(resumed_from))
    end_without_traceback(interrupt)
    raise interrupt.with_traceback(None) from None


def _default_signals() -> list[int]:
    return [number for name in ("SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None]


def _check_signals(signals: Iterable[int]) -> tuple[signal.Signals, ...]:
    try:
        numbers = tuple(signal.Signals(number) for number in signals)
    except (TypeError, ValueError):
        expected = "a list of signals, such as [signal.SIGTERM]"
        raise ValueError(wrong_argument("PreemptionHandler(signals=...)", expected, signals)) from None
    forbidden = {getattr(signal, name, None) for name in ("SIGINT", "SIGKILL", "SIGSTOP")}
    wrong = [number.name for number in numbers if number in forbidden]
    if wrong:
        raise ValueError(
            f"PreemptionHandler cannot take {', '.join(wrong)}: SIGINT is Ctrl-C, which save_on_interrupt=True "
            "handles, and SIGKILL and SIGSTOP reach no process."
        )
    return numbers
