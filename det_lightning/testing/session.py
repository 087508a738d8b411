"""A session of pytest with ``--trial``: one test for each check, the checklist at the end, and the HTML report."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from det_lightning.testing.checks import CHECKS, Check
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.outcomes import BadTrial, CheckFailed, NotChecked

if TYPE_CHECKING:
    from det_lightning.testing.training.runs import TrialRuns

_MARKS = {"passed": ("[x]", "green"), "failed": ("[ ]", "red"), "skipped": ("[-]", "yellow")}


class CheckItem(pytest.Item):
    """One check of a trial."""

    def __init__(self, check: Check, runs: TrialRuns, **node: Any) -> None:
        super().__init__(**node)
        self._check = check
        self._runs = runs
        self.user_properties.append(("check", check.name))
        self.add_marker("trial_check")
        self.add_marker(check.keyword)

    def runtest(self) -> None:
        try:
            self._check.run(self._runs)
        except NotChecked as e:
            pytest.skip(f"not checked: {e}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return what is wrong with the trial, without the way that the check took."""
        if isinstance(excinfo.value, CheckFailed | BadTrial):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.parent.name if self.parent is not None else ''} {self.name}"


class TrialCollector(pytest.Collector):
    """Collects the checks of a trial."""

    def __init__(self, options: TrialOptions, runs: TrialRuns, **node: Any) -> None:
        super().__init__(**node)
        self._options = options
        self._runs = runs

    def collect(self) -> Iterable[pytest.Item]:
        """Import the trial once, and yield its checks."""
        try:
            self._runs.require_importable()
        except BadTrial as e:
            raise self.CollectError(str(e)) from None
        for check in CHECKS:
            if check.option is None or getattr(self._options, check.option) is not None:
                yield CheckItem.from_parent(self, name=check.name, check=check, runs=self._runs)


class TrialSession:
    """The plugin of a session that checks a trial."""

    def __init__(self, options: TrialOptions) -> None:
        self._options = options
        self._runs: TrialRuns | None = None
        self._reports: dict[str, pytest.TestReport] = {}

    def _trial_runs(self) -> TrialRuns:
        """Return the runs, which bring torch: the process that only hands out work to others needs none."""
        if self._runs is None:
            with warnings.catch_warnings():
                # What Lightning and others say when they are imported is not an error of the trial, whatever -W says.
                warnings.simplefilter("ignore")
                from det_lightning.testing.training.runs import TrialRuns

            self._runs = TrialRuns(self._options)
        return self._runs

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the checks to what the session collects, also where there is no test file."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            name = self._options.spec.replace("::", ":")
            checks = TrialCollector.from_parent(
                collector, name=name, nodeid=name, options=self._options, runs=self._trial_runs()
            )
            report.result = [*(report.result or []), checks]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of each check."""
        name = dict(report.user_properties).get("check")
        if isinstance(name, str) and (report.when == "call" or report.outcome != "passed"):
            self._reports[name] = report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the checklist, with the reason of each line that is not checked off."""
        if self._reports:
            terminalreporter.section(f"checks of {self._options.spec}")
        for check in CHECKS:
            if (report := self._reports.get(check.name)) is not None:
                mark, colour = _MARKS[report.outcome]
                reason = _in_one_line(_message_of(report))
                terminalreporter.line(f"{mark} {check.name}  {reason}".rstrip(), **{colour: True})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report, if one is wanted; of several processes the one that has the outcome of all checks."""
        if self._options.report is None or hasattr(session.config, "workerinput") or not self._reports:
            return
        from det_lightning.testing.report import CheckResult, write_trial_report

        results = [
            CheckResult(check.name, report.outcome, report.duration, _message_of(report))
            for check in CHECKS
            if (report := self._reports.get(check.name)) is not None
        ]
        command = shlex.join(["pytest", *map(str, session.config.invocation_params.args)])
        write_trial_report(self._options.report, self._trial_runs(), results, command)

    def pytest_unconfigure(self) -> None:
        """Remove the checkpoints of the runs."""
        if self._runs is not None:
            self._runs.close()


def _message_of(report: pytest.TestReport) -> str:
    """Return why a check failed or was skipped; nothing if it passed."""
    if report.outcome == "passed":
        return ""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def _in_one_line(message: str) -> str:
    """Return the first line of a message, with what it announces."""
    first, _, rest = message.partition("\n")
    return f"{first} {rest.partition(chr(10))[0].strip(' -')}" if first.endswith(":") else first
