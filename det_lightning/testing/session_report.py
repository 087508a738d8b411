"""The HTML report of a session."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from det_lightning.testing.check_items import message_of
from det_lightning.testing.checks import CHECKS
from det_lightning.testing.outcomes import BadTrial, NotChecked
from det_lightning.testing.report import CheckResult, ReportData, write_report
from det_lightning.testing.training.reference import Conversion, record_ours
from det_lightning.testing.training.runs import TrialRuns

__all__ = ["write_session_report"]


def write_session_report(runs: TrialRuns, reports: Mapping[str, pytest.TestReport], command: str) -> None:
    """Write the report to where the options say."""
    path = runs.options.report
    assert path is not None
    checks = [
        CheckResult(check.name, report.outcome, report.duration, message_of(report))
        for check in CHECKS
        if (report := reports.get(check.name)) is not None
    ]
    conversion = _conversion(runs)
    if conversion is not None:
        reference, ours, difference = conversion.reference, conversion.ours, conversion.difference
        write_report(path, ReportData(runs.source.name, checks, reference, ours, difference, command))
    else:
        ours = record_ours(runs.source, runs.reference_settings)
        write_report(path, ReportData(runs.source.name, checks, ours=ours, command=command))


def _conversion(runs: TrialRuns) -> Conversion | None:
    try:
        return runs.conversion
    except (BadTrial, NotChecked):
        return None
