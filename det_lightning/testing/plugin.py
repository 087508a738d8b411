"""The pytest plugin: ``pytest --trial model_def:MyTrial`` checks a ported trial.

Change here: an option of ``pytest --trial`` is an entry of ``_OPTIONS``, and a field of ``TrialOptions`` in
``det_lightning/testing/options.py``.

Every run of pytest imports this module, so nothing slow is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import warnings
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from det_lightning.testing.checks import CHECKS, BadTrial, Check, CheckFailed, CheckResult, NotCompared
from det_lightning.testing.options import TrialOptions, trial_options

if TYPE_CHECKING:
    from det_lightning.testing.training.trainings import TrialRuns

_OPTIONS: dict[str, dict[str, Any]] = {
    "--trial": {"metavar": "MODULE:CLASS", "help": "check this trial; also path/to/file.py:CLASS"},
    "--trial-config": {"metavar": "FILE", "help": "its experiment configuration, such as const.yaml"},
    "--trial-hparams": {
        "metavar": "JSON",
        "help": "its hyperparameters, which override the hyperparameters of the configuration",
    },
    "--trial-kwargs": {"metavar": "JSON", "help": "arguments of its constructor beyond the context"},
    "--trial-batches": {"metavar": "N", "type": int, "default": 12, "help": "batches of each run (default: 12)"},
    "--trial-quick": {"action": "store_true", "help": "only the checks that train in this process"},
    "--trial-reference": {"metavar": "FILE", "help": "compare with this record of the real determined"},
    "--trial-tolerance": {"metavar": "SHARE", "type": float, "help": "relative tolerance for numbers of the reference"},
    "--trial-checkpoint": {"metavar": "PATH", "help": "load this old checkpoint, and validate with it"},
    "--trial-metrics": {"metavar": "JSON", "help": "its validation metrics, if the checkpoint does not have them"},
    "--trial-report": {"metavar": "FILE", "help": "write the checks and the curves as an HTML page"},
}
_MARKS = {"passed": ("[x]", "green"), "failed": ("[ ]", "red"), "skipped": ("[-]", "yellow")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("det_lightning", "checks of a ported Determined trial (det_lightning)")
    for name, settings in _OPTIONS.items():
        group.addoption(name, **settings)


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin for the checks, given a trial."""
    try:
        options = trial_options(config.option, Path(config.invocation_params.dir))
    except BadTrial as e:
        raise pytest.UsageError(str(e)) from None
    if options is not None:
        config.pluginmanager.register(TrialSession(options), "det_lightning_trial")


class _Terminated(BaseException):
    """SIGTERM was received. A BaseException, so that neither trial nor check catches it as an error of the trial."""


@contextlib.contextmanager
def _sigterm_ends_pytest() -> Iterator[None]:
    """After SIGTERM in the block, end the pytest session with the exit status of a killed process."""
    before = signal.getsignal(signal.SIGTERM)
    came = False

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal came
        came = True
        if callable(before):
            before(number, frame)
        raise _Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except BaseException:
        # Other code on the way here may have turned _Terminated into another error.
        if not came:
            raise
    finally:
        # None means a handler that Python did not install and cannot restore.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if came:
        pytest.exit("received SIGTERM: the check that was under way has no result", returncode=128 + signal.SIGTERM)


class CheckItem(pytest.Item):
    """One check of a trial."""

    def __init__(self, check: Check, runs: TrialRuns, **node: Any) -> None:
        super().__init__(**node)
        self._check = check
        self._runs = runs
        self.user_properties.append(("check", check.name))

    def runtest(self) -> None:
        with _sigterm_ends_pytest():
            try:
                remarks = self._check.run(self._runs)
            except NotCompared as e:
                pytest.skip(f"not compared: {e}")
            self.user_properties += [("remark", remark) for remark in remarks]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Say what is wrong with the trial, without the traceback of the check."""
        if isinstance(excinfo.value, CheckFailed | BadTrial):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.parent.name if self.parent is not None else ''} {self.name}"


class TrialCollector(pytest.Collector):
    """Collects the checks of a trial."""

    def __init__(self, runs: TrialRuns, **node: Any) -> None:
        super().__init__(**node)
        self._runs = runs

    def collect(self) -> Iterable[pytest.Item]:
        try:
            with self._runs.source.import_class():
                pass
        except BadTrial as e:
            raise self.CollectError(str(e)) from None
        options = self._runs.options
        for check in CHECKS:
            is_possible = check.option is None or getattr(options, check.option) is not None
            if is_possible and (check.is_quick or not options.quick):
                yield CheckItem.from_parent(self, name=check.name, check=check, runs=self._runs)


class TrialSession:
    """The plugin for a pytest session that checks a trial."""

    def __init__(self, options: TrialOptions) -> None:
        self._options = options
        self._by_check: dict[str, CheckResult] = {}
        self._unwritten: str | None = None  # why there is no report

    @functools.cached_property
    def _runs(self) -> TrialRuns:
        """The runs. Their module imports torch, which the controller of pytest-xdist does not need."""
        with warnings.catch_warnings():
            # Warnings from importing Lightning and others are not errors of the trial, whatever -W says.
            warnings.simplefilter("ignore")
            from det_lightning.testing.training.trainings import TrialRuns

        return TrialRuns(self._options)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the checks to the collected tests, even if there is no test file."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            name = self._options.spec.replace("::", ":")
            checks = TrialCollector.from_parent(collector, name=name, nodeid=name, runs=self._runs)
            report.result = [*(report.result or []), checks]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = dict(report.user_properties).get("check")
        if isinstance(name, str) and (report.when == "call" or report.outcome != "passed"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            remarks = [f"remark: {text}" for label, text in report.user_properties if label == "remark"]
            message = "\n".join(remarks) if report.outcome == "passed" else str(reason).removeprefix("Skipped: ")
            self._by_check[name] = CheckResult(name, report.outcome, report.duration, message)

    def _results(self) -> list[CheckResult]:
        return [self._by_check[check.name] for check in CHECKS if check.name in self._by_check]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the checks, with a reason for each check that did not pass."""
        if not self._by_check:
            return
        terminalreporter.section(f"checks of {self._options.spec}")
        for result in self._results():
            mark, colour = _MARKS[result.outcome]
            reason, _, rest = result.message.partition("\n")
            if reason.endswith(":"):  # it announces a list
                reason += f" {rest.partition(chr(10))[0].strip(' -')}"
            terminalreporter.line(f"{mark} {result.name}  {reason}".rstrip(), **{colour: True})
        if self._options.quick:
            left_out = sum(not check.is_quick for check in CHECKS)
            terminalreporter.line(f"--trial-quick left out the {left_out} checks that start other processes.")
        if self._unwritten is not None:
            terminalreporter.line(self._unwritten, red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report for ``--trial-report``, though not in workers of pytest-xdist."""
        if self._options.report is None or hasattr(session.config, "workerinput") or not self._by_check:
            return
        from det_lightning.testing.report import write_report

        command = shlex.join(["pytest", *map(str, session.config.invocation_params.args)])
        records, difference = self._runs.find_records()
        try:
            write_report(self._options.report, self._runs.source.name, self._results(), records, difference, command)
        except OSError as e:  # such as a full disk
            self._unwritten = f"--trial-report cannot be written: {e}"
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    def pytest_unconfigure(self) -> None:
        if "_runs" in vars(self):
            self._runs.close()
