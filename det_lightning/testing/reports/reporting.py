"""The HTML report of a session."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from det_lightning.testing.collecting import message_of
from det_lightning.testing.conversion import Conversion, own_record, settings_of
from det_lightning.testing.evidence import Evidence
from det_lightning.testing.outcomes import BadTrial, UncheckedPromise
from det_lightning.testing.promises import PROMISES
from det_lightning.testing.reports.report import Promise, ReportData, write_report

__all__ = ["write_session_report"]


def write_session_report(evidence: Evidence, reports: Mapping[str, pytest.TestReport], command: str) -> None:
    """Write the report to where the options say."""
    path = evidence.options.report
    assert path is not None
    promises = [
        Promise(promise.name, report.outcome, report.duration, message_of(report))
        for promise in PROMISES
        if (report := reports.get(promise.name)) is not None
    ]
    conversion = _conversion(evidence)
    if conversion is not None:
        reference, ours, difference = conversion.reference, conversion.ours, conversion.difference
        write_report(path, ReportData(evidence.setup.source.name, promises, reference, ours, difference, command))
    else:
        ours = own_record(evidence.setup, settings_of(evidence.options, evidence.setup))
        write_report(path, ReportData(evidence.setup.source.name, promises, ours=ours, command=command))


def _conversion(evidence: Evidence) -> Conversion | None:
    try:
        return evidence.conversion
    except (BadTrial, UncheckedPromise):
        return None
