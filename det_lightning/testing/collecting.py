"""Promises as items of pytest."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, BrokenPromise, UncheckedPromise
from det_lightning.testing.promises import PROMISES, Promise

if TYPE_CHECKING:
    from det_lightning.testing.evidence import Evidence

__all__ = ["PromiseCollector", "PromiseItem", "message_of"]


class PromiseCollector(pytest.Collector):
    """Collects one item for each promise of a trial."""

    def __init__(self, options: TrialOptions, evidence: Evidence, **node: Any) -> None:
        super().__init__(**node)
        self._options = options
        self._evidence = evidence

    def collect(self) -> Iterable[pytest.Item]:
        """Import the trial once, and collect its promises.

        Raises:
            CollectError: the trial can not be imported; says why.
        """
        try:
            self._evidence.require_importable()
        except BadTrial as e:
            raise self.CollectError(str(e)) from None
        for promise in PROMISES:
            if promise.option is None or getattr(self._options, promise.option) is not None:
                yield PromiseItem.from_parent(self, name=promise.name, promise=promise, evidence=self._evidence)


class PromiseItem(pytest.Item):
    """One promise, to be checked."""

    def __init__(self, promise: Promise, evidence: Evidence, **node: Any) -> None:
        super().__init__(**node)
        self._check = functools.partial(promise.check, evidence)
        self.user_properties.append(("promise", promise.name))
        self.add_marker("trial_promise")
        self.add_marker(promise.keyword)

    def runtest(self) -> None:
        """Check the promise; skip it where that can not be done."""
        try:
            self._check()
        except UncheckedPromise as e:
            pytest.skip(f"not checked: {e}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Say what is broken, without the way that the check took."""
        if isinstance(excinfo.value, BrokenPromise | BadTrial):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Tell where the promise stands, for headings."""
        return self.path, None, f"{self.parent.name if self.parent is not None else ''} {self.name}"


def message_of(report: pytest.TestReport) -> str:
    """Return why a promise failed or was not checked; nothing if it holds."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)
