"""``det-lightning checkpoint export``: a checkpoint, or all of a storage, as single files for other programs."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import keyword
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import util
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from det_lightning.cli.arguments import JsonFlag, Options, TrustedFlag, output_directory, output_file, parse_options
from det_lightning.cli.output import as_command_line, print_json, print_lines, report_errors, warn
from det_lightning.escaping import escape

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.content import CheckpointContent
    from det_lightning.checkpoint.storage.location import Location


class ExportKind(str, enum.Enum):
    """The format of an exported file."""

    weights = "weights"
    safetensors = "safetensors"
    lightning = "lightning"


class _PlainModule(NamedTuple):
    """The LightningModule of ``--module``."""

    given: str
    file: pathlib.Path
    kind: Any


# Not the name of the file: another module may be loaded under that name.
_IMPORTED = "_module_of_export"
_SUFFIXES = {ExportKind.weights: ".pt", ExportKind.safetensors: ".safetensors", ExportKind.lightning: ".ckpt"}
_PROGRAM = """\
import {package} as pl
from {module} import {name}

module = {name}.load_from_checkpoint({file!r})
trainer = pl.Trainer(max_epochs=1, num_sanity_val_steps=0)
trainer.fit(module, ckpt_path={file!r})"""


@report_errors()
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="Path or URL of a checkpoint, or with --all of a storage.", show_default=False)
    ],
    to: Annotated[
        ExportKind,
        typer.Option(
            help="weights: a state dict for torch.load; safetensors: the same without pickle; lightning: a .ckpt that "
            "pl.Trainer.fit(TrialModule(...), ckpt_path=...) resumes from. With several models the names of weights "
            "begin with models.<index>.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="The file to write; with --all the directory.", show_default=False)
    ],
    all_: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Export all complete checkpoints of a storage. Earlier exports are kept; with --module the names of "
            "files have the name of the class.",
        ),
    ] = False,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:CLASS",
            help="With --to lightning: write the .ckpt for this LightningModule, such as a result of "
            "`port --to lightning`. The class is imported, and created with the trial's hyperparameters.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint, or all of a storage, as files for other programs."""
    from det_lightning.cli.checkpoint_locations import locate_checkpoint

    if module is not None and to is not ExportKind.lightning:
        raise ValueError("--module needs --to lightning.")
    options = parse_options(option)
    with contextlib.ExitStack() as stack:
        # An end by a signal removes the unfinished file.
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        stack.callback(signal.signal, signal.SIGTERM, previous)
        target = output_directory(output) if all_ else output_file(output, force)
        plain = None if module is None else stack.enter_context(_import_module(module))
        write = functools.partial(_export_one, to=to, plain=plain, trusted=trusted, options=options)
        if all_:
            suffix = _SUFFIXES[to] if plain is None else f".{plain.kind.__name__}{_SUFFIXES[to]}"
            _export_all(checkpoint, options, target, suffix, write, force=force, json=json)
            return
        left_out = write(locate_checkpoint(checkpoint, options), target)
    _warn_of_missing(left_out)
    if json:
        print_json({"path": str(target), "bytes": target.stat().st_size, "left_out": left_out})
    else:
        print_lines([str(target)])
    for line in [] if plain is None else _write_program(plain, target).splitlines():
        warn(line)


def _warn_of_missing(names: list[str], prefix: str = "") -> None:
    if names:
        warn(f"{prefix}Left out, since they are not tensors: {', '.join(names)}")


def _export_all(
    url: str,
    options: dict[str, Any],
    folder: pathlib.Path,
    suffix: str,
    write: Callable[..., list[str]],
    *,
    force: bool,
    json: bool,
) -> None:
    """Export each complete checkpoint into a separate file; a failed export does not stop the others."""
    from det_lightning.cli.checkpoint_locations import open_storage

    storage = open_storage(url, options)
    summary: dict[str, list[str]] = {"exported": [], "already_there": [], "failed": []}
    left_out: dict[str, list[str]] = {}
    for checkpoint_id in sorted(storage.list_ids()):
        file = folder / f"{checkpoint_id}{suffix}"
        try:
            if not force and _is_exported(file):
                summary["already_there"].append(checkpoint_id)
                continue
            missing = write(storage.root / checkpoint_id, file)
        except Exception as e:  # also of the imported module
            warn(f"{checkpoint_id}: {as_command_line(str(e)) or type(e).__name__}")
            summary["failed"].append(checkpoint_id)
            continue
        summary["exported"].append(checkpoint_id)
        _warn_of_missing(missing, f"{checkpoint_id}: ")
        if missing:
            left_out[checkpoint_id] = missing
    if json:
        print_json({"directory": str(folder), **summary, "left_out": left_out})
    else:
        counts = ", ".join(f"{len(ids)} {name.replace('_', ' ')}" for name, ids in summary.items())
        print_lines([f"{counts}, in {folder}"])
    if summary["failed"]:
        raise typer.Exit(1)


def _is_exported(file: pathlib.Path) -> bool:
    """Return whether a file is an earlier export, by its first bytes; raise if it is something else."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as opened:
        begin = opened.read(9)
    # Before the JSON of safetensors stand the eight bytes of its length; torch.save writes a zip archive.
    if not (begin[8:] == b"{" if file.suffix == ".safetensors" else begin.startswith(b"PK\3\4")):
        raise FileExistsError(f"{file} is not the export of a checkpoint; --force replaces it.")
    return True


def _export_one(
    location: Location,
    file: pathlib.Path,
    *,
    to: ExportKind,
    plain: _PlainModule | None,
    trusted: bool,
    options: dict[str, Any],
) -> list[str]:
    """Export a checkpoint; return the names of omitted entries."""
    from det_lightning.checkpoint import exports  # imports torch
    from det_lightning.checkpoint.safe_load import read_checkpoint
    from det_lightning.cli.checkpoint_locations import open_local

    with open_local(location, options) as directory:
        content = read_checkpoint(directory, trusted=trusted, only_weights=to is not ExportKind.lightning)
        exports.require_tensors(content)
        if plain is not None:
            exports.export_for_module(content, *_create_module(plain, content), file)
        elif to is ExportKind.lightning:
            exports.export_lightning(content, file)
        elif to is ExportKind.weights:
            exports.export_weights(content, file)
        else:
            return exports.export_safetensors(content, file)
    return []


@contextlib.contextmanager
def _import_module(given: str) -> Iterator[_PlainModule]:
    """Import the class of ``FILE:CLASS`` for a ``with`` block, in which it may import files beside it."""
    import torch

    # Before the search path changes.
    from det_lightning.checkpoint import exports, safe_load  # noqa: F401
    from det_lightning.cli import checkpoint_locations  # noqa: F401
    from det_lightning.importing import import_from_path

    name, _, class_name = given.rpartition(":")
    file = pathlib.Path(name)
    if file.suffix != ".py" or not class_name.isidentifier():
        raise ValueError(f"--module takes FILE:CLASS, such as module.py:MyModule; got {given!r}.")
    if not file.is_file():
        raise FileNotFoundError(f"--module {given}: there is no file {file}.")
    if not file.stem.isidentifier() or keyword.iskeyword(file.stem):
        raise ValueError(f"--module {given}: no program can import {file.name}; rename it, such as to my_module.py.")
    with import_from_path(file.parent):
        spec = util.spec_from_file_location(_IMPORTED, file.resolve())
        assert spec is not None
        assert spec.loader is not None
        imported = sys.modules[_IMPORTED] = util.module_from_spec(spec)
        try:
            spec.loader.exec_module(imported)
        except (Exception, SystemExit) as e:
            raise ValueError(f"--module {given}: {file} cannot be imported: {type(e).__name__}: {e}") from e
        found = getattr(imported, class_name, None)
        if found is None:
            raise ValueError(f"--module {given}: {file} has no class {class_name}.")
        is_module = isinstance(found, type) and issubclass(found, torch.nn.Module)
        if not (is_module and hasattr(found, "load_from_checkpoint")):
            raise ValueError(f"--module {given}: {class_name} is not the class of a LightningModule.")
        yield _PlainModule(given, file, found)


def _create_module(plain: _PlainModule, content: CheckpointContent) -> tuple[Any, str | None]:
    """Create the module; also return the name of the parameter that took all hyperparameters, or None."""
    from det_lightning.checkpoint.format.resume_state import read_settings

    hparams = read_settings(content.resume, content.load_data)["hparams"] or {}
    parameters = inspect.signature(plain.kind).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    as_one = "hparams" in parameters and parameters["hparams"].kind is not inspect.Parameter.VAR_KEYWORD
    given_ones = {name: value for name, value in hparams.items() if takes_all or name in parameters}
    try:
        created = plain.kind(hparams=hparams) if as_one else plain.kind(**given_ones)
    except (Exception, SystemExit) as e:
        raise ValueError(
            f"--module {plain.given}: {plain.kind.__name__} does not take the trial's hyperparameters: "
            f"{type(e).__name__}: {e}"
        ) from e
    return created, "hparams" if as_one else None


def _write_program(plain: _PlainModule, file: pathlib.Path) -> str:
    uses_lightning = any(base.__module__.startswith("lightning.") for base in plain.kind.__mro__)
    package = "lightning.pytorch" if uses_lightning else "pytorch_lightning"
    return _PROGRAM.format(package=package, module=plain.file.stem, name=plain.kind.__name__, file=escape(file))
