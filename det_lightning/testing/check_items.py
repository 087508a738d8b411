"""Checks as items of pytest."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from det_lightning.testing.checks import CHECKS, Check
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, CheckFailed, NotChecked

if TYPE_CHECKING:
    from det_lightning.testing.training.runs import TrialRuns

__all__ = ["CheckCollector", "CheckItem", "message_of"]


class CheckCollector(pytest.Collector):
    """Collects one item for each check of a trial."""

    def __init__(self, options: TrialOptions, runs: TrialRuns, **node: Any) -> None:
        super().__init__(**node)
        self._options = options
        self._evidence = runs

    def collect(self) -> Iterable[pytest.Item]:
        """Import the trial once, and collect its checks.

        Raises:
            CollectError: the trial cannot be imported; says why.
        """
        try:
            self._evidence.require_importable()
        except BadTrial as e:
            raise self.CollectError(str(e)) from None
        for check in CHECKS:
            if check.option is None or getattr(self._options, check.option) is not None:
                yield CheckItem.from_parent(self, name=check.name, check=check, runs=self._evidence)


class CheckItem(pytest.Item):
    """One check, to be checked."""

    def __init__(self, check: Check, runs: TrialRuns, **node: Any) -> None:
        super().__init__(**node)
        self._check = functools.partial(check.run, runs)
        self.user_properties.append(("check", check.name))
        self.add_marker("trial_check")
        self.add_marker(check.keyword)

    def runtest(self) -> None:
        """Check the check; skip it where that cannot be done."""
        try:
            self._check()
        except NotChecked as e:
            pytest.skip(f"not checked: {e}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Say what is broken, without the way that the check took."""
        if isinstance(excinfo.value, CheckFailed | BadTrial):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Tell where the check stands, for headings."""
        return self.path, None, f"{self.parent.name if self.parent is not None else ''} {self.name}"


def message_of(report: pytest.TestReport) -> str:
    """Return why a check failed or was not checked; nothing if it holds."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)
