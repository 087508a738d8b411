"""Arguments shared by several commands, and the parsing of values."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Annotated, Any

import typer

from det_lightning.files.file_kinds import require_output
from det_lightning.masking import mask_url

EXIT_CODES = (
    "Exit codes: 0 success; 1 a checkpoint is damaged, incomplete or unsafe; 2 wrong usage, or a storage cannot be "
    "reached."
)

TYPER_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

Checkpoint = Annotated[str, typer.Argument(help="Path or URL of a checkpoint's directory.", show_default=False)]
Storage = Annotated[
    str, typer.Argument(help="A directory of checkpoints, or a URL such as s3://bucket/prefix.", show_default=False)
]
Experiment = Annotated[
    pathlib.Path, typer.Argument(metavar="EXPERIMENT", help="The directory of an experiment.", show_default=False)
]
Experiments = Annotated[
    pathlib.Path,
    # A shell leaves the ~ of --experiments=~/runs to the program.
    typer.Option("--experiments", callback=pathlib.Path.expanduser, help="Parent directory of the experiments."),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Option of the URL's file system, such as endpoint_url=http://host:9000 or anon=true; may be repeated.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Write JSON, and nothing else, to the standard output.")]
TrustedFlag = Annotated[
    bool, typer.Option("--trusted", help="Unpickle without restrictions, which runs any code in the files.")
]

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """Return the values of ``--option`` by name; constants, integers, and JSON lists and objects are parsed."""
    options = {}
    for entry in given or []:
        key, equals, value = entry.partition("=")
        if not equals or not key.isidentifier():
            shown = f"the key {key!r}" if equals else repr(mask_url(key))  # the value may be a secret
            raise ValueError(f"--option must be name=value, such as anon=true; got {shown}.")
        options[key] = _parse_value(key, value)
    return options


def output_file(output: str, force: bool) -> pathlib.Path:
    """Return the local file of ``--output``; raise if the file exists, unless ``force``."""
    file = _expand_path(output)
    try:
        require_output(file)
    except OSError as e:
        raise ValueError(f"--output {output!r}: {e}") from e
    if file.exists() and not force:
        raise ValueError(f"--output {output!r} exists; --force replaces it.")
    return file


def output_directory(output: str) -> pathlib.Path:
    """Return the local directory of ``--output``, created if necessary."""
    directory = _expand_path(output)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--output takes the path of a directory here; {output!r} is a file.")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _expand_path(output: str) -> pathlib.Path:
    if "://" in output:
        raise ValueError(f"--output takes a local path; got {output!r}.")
    try:
        return pathlib.Path(output).expanduser()
    except RuntimeError as e:
        raise ValueError(f"--output {output!r}: {e}") from e


def _parse_value(key: str, value: str) -> Any:
    if value.lower() in _CONSTANTS:
        return _CONSTANTS[value.lower()]
    if re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    if value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError as e:
            raise ValueError(f"--option {key}=... looks like JSON, but is invalid: {e}.") from e
    return value
