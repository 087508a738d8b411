"""Dropping findings in one file that the rest of the project shows not to apply."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import defaultdict

from det_lightning.porting.facts import Facts, Kind
from det_lightning.porting.file_graph import FileGraph
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Premise


def without_pointless_findings(graph: FileGraph) -> list[FilePort]:
    """Return the files of a project without the findings whose premise the project disproves."""
    configurations: defaultdict[pathlib.Path, list[Facts]] = defaultdict(list)
    users: defaultdict[pathlib.Path, list[Facts]] = defaultdict(list)
    for port in graph.ports.values():
        if port.facts.kind is Kind.configuration:
            for reached in graph.reached_by(port):
                configurations[reached.path].append(port.facts)
        elif port.facts.uses_determined:
            for imported in graph.imported_by(port):
                users[imported.path].append(port.facts)
    kept = []
    for port in graph.ports.values():
        around = (configurations[port.path], users[port.path])
        kept.append(dataclasses.replace(port, findings=[one for one in port.findings if _is_relevant(one, *around)]))
    return kept


def _is_relevant(finding: Finding, configurations: list[Facts], users: list[Facts]) -> bool:
    """Return whether a finding still holds, given the configurations that reach its file and what imports it."""
    if finding.premise is Premise.by_hand:
        return not configurations
    if finding.premise is Premise.variable_unset:
        name = finding.reason.partition(":")[0]
        return not configurations or any(name not in config.sets for config in configurations)
    if finding.premise is Premise.in_trial:
        return not users or any(user.uses_trials for user in users)
    return True
