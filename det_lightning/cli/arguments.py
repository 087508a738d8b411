"""Arguments that several commands take, and what they mean."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from det_lightning.masking import mask_text

__all__ = [
    "EXIT_CODES",
    "TYPER_SETTINGS",
    "Checkpoint",
    "JsonFlag",
    "Options",
    "Storage",
    "TrustedFlag",
    "parse_options",
]

EXIT_CODES = (
    "Exit codes: 0 all is fine; 1 something is wrong with a checkpoint; 2 the command was not used as it should be, or "
    "something can not be reached."
)

TYPER_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

Checkpoint = Annotated[str, typer.Argument(help="Path or URL of a checkpoint's directory.", show_default=False)]
Storage = Annotated[
    str,
    typer.Argument(help="A directory of checkpoints, or a URL such as s3://bucket/prefix.", show_default=False),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="What the file system of a URL needs to know, such as endpoint_url=http://host:9000 or anon=true; may be "
        "given several times.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Write JSON, and nothing else, to the standard output.")]
TrustedFlag = Annotated[
    bool,
    typer.Option("--trusted", help="Unpickle anything, running whatever code the files ask for."),
]

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """Return what ``--option`` was given.

    ``true``, ``false``, ``null``, integers, and JSON's lists and objects are taken for what they are; all else is text.

    Raises:
        ValueError: an option is not of the form KEY=VALUE, or not the JSON that it looks like.
    """
    options = {}
    for entry in given or []:
        key, equals, value = entry.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"--option takes KEY=VALUE, such as anon=true; got {_shown(key, equals)}.")
        options[key] = _parse_value(key, value)
    return options


def _shown(key: str, equals: str) -> str:
    # Not what stands behind the sign, which may be a secret.
    return f"{key!r} before the sign" if equals else repr(mask_text(key))


def _parse_value(key: str, value: str) -> Any:
    if value.lower() in _CONSTANTS:
        return _CONSTANTS[value.lower()]
    if re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    if value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError as e:
            raise ValueError(f"--option {key}=... looks like JSON, but is none: {e}.") from e
    return value
