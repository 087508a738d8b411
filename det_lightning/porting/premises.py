"""Findings in one file that the rest of the project makes pointless."""

from __future__ import annotations

import dataclasses
import pathlib

from det_lightning.porting.facts import Kind
from det_lightning.porting.file_graph import FileGraph
from det_lightning.porting.file_port import FilePort
from det_lightning.porting.findings import Finding, Premise


def without_pointless_findings(graph: FileGraph) -> list[FilePort]:
    """Return the files of a project without the findings whose premise the project shows to be otherwise."""
    project = _Project(graph)
    return [
        dataclasses.replace(port, findings=[found for found in port.findings if project.has_point(port, found)])
        for port in graph.ports.values()
    ]


class _Project:
    """Knows of each file what it is used by.

    Args:
        graph: the project.
    """

    def __init__(self, graph: FileGraph) -> None:
        self._configurations: dict[pathlib.Path, list[FilePort]] = {}
        self._users: dict[pathlib.Path, list[FilePort]] = {}
        for port in graph.ports.values():
            if port.facts.kind is Kind.configuration:
                for reached in graph.reached_by(port):
                    self._configurations.setdefault(reached.path, []).append(port)
            elif port.facts.uses_determined:
                for imported in graph.imported_by(port):
                    self._users.setdefault(imported.path, []).append(port)

    def has_point(self, port: FilePort, finding: Finding) -> bool:
        """Return whether nothing in the project makes a finding in one of its files pointless."""
        configurations = self._configurations.get(port.path, [])
        if finding.premise is Premise.by_hand:
            return not configurations
        if finding.premise is Premise.variable_unset:
            name = finding.reason.partition(":")[0]
            return not configurations or any(name not in config.facts.sets for config in configurations)
        if finding.premise is Premise.in_trial:
            users = self._users.get(port.path, [])
            return not users or any(user.facts.uses_trials for user in users)
        return True
