"""Porting the files of a Determined project to det_lightning. Imports neither torch nor Lightning."""

from det_lightning.porting.entry_points import EntryPoint, Outcome
from det_lightning.porting.file_port import FilePort, port_file
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.project import ProjectPort, find_files, port_project

__all__ = [
    "EntryPoint",
    "FilePort",
    "Finding",
    "Outcome",
    "ProjectPort",
    "Severity",
    "find_files",
    "port_file",
    "port_project",
]
