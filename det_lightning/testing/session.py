"""What pytest does when a trial is named: collect its checks, print the checklist, write the report."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from det_lightning.testing.check_items import CheckCollector, message_of
from det_lightning.testing.checks import CHECKS
from det_lightning.testing.options import TrialOptions

if TYPE_CHECKING:
    from det_lightning.testing.training.runs import TrialRuns

__all__ = ["Checklist"]

_MARKS = {"passed": "[x]", "failed": "[ ]", "skipped": "[-]"}


class Checklist:
    """A plugin for one session.

    Args:
        options: which trial, and how it is trained.
    """

    def __init__(self, options: TrialOptions) -> None:
        self._options = options
        self._evidence: TrialRuns | None = None
        self._reports: dict[str, pytest.TestReport] = {}

    def _gather(self) -> TrialRuns:
        """Return the runs, which brings torch: the process that only hands out work to others needs none."""
        if self._evidence is None:
            with warnings.catch_warnings():
                # What Lightning and others say when they are imported is no error of the trial, whatever -W says.
                warnings.simplefilter("ignore")
                from det_lightning.testing.training.runs import TrialRuns

            self._evidence = TrialRuns(self._options)
        return self._evidence

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the checks to what the session collects, also where there is no test file."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            name = self._options.spec.replace("::", ":")
            checks = CheckCollector.from_parent(
                collector, name=name, nodeid=name, options=self._options, runs=self._gather()
            )
            report.result = [*(report.result or []), checks]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what is said of each check."""
        name = dict(report.user_properties).get("check")
        if isinstance(name, str) and (report.when == "call" or report.outcome != "passed"):
            self._reports[name] = report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the checklist, with the reason of each line that is not checked off."""
        if not self._reports:
            return
        terminalreporter.section(f"checks of {self._options.spec}")
        for check in CHECKS:
            if check.name in self._reports:
                report = self._reports[check.name]
                colour = {"passed": "green", "failed": "red", "skipped": "yellow"}[report.outcome]
                reason = "" if report.outcome == "passed" else f"  {_in_one_line(message_of(report))}"
                terminalreporter.line(f"{_MARKS[report.outcome]} {check.name}{reason}", **{colour: True})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report, if one is wanted; of several processes the one that has heard of all checks."""
        config = session.config
        if self._options.report is not None and not hasattr(config, "workerinput") and self._reports:
            from det_lightning.testing.session_report import write_session_report

            command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
            write_session_report(self._gather(), self._reports, command)

    def pytest_unconfigure(self) -> None:
        """Remove the checkpoints of the runs."""
        if self._evidence is not None:
            self._evidence.close()


def _in_one_line(message: str) -> str:
    """Return the first line of a message, with what it announces."""
    first, _, rest = message.partition("\n")
    return f"{first} {rest.partition(chr(10))[0].strip(' -')}" if first.endswith(":") else first
