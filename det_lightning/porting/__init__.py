"""Porting the files of a Determined project to det_lightning. Imports neither torch nor Lightning."""

from det_lightning.porting.file_port import FilePort, port_file
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.project import find_files, port_paths

__all__ = ["FilePort", "Finding", "Severity", "find_files", "port_file", "port_paths"]
