"""``det-lightning checkpoint export``: a checkpoint, or all of a storage, as single files for other programs."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from det_lightning import errors
from det_lightning.cli.arguments import JsonFlag, Options, TrustedFlag, output_file, parse_options
from det_lightning.cli.output import print_json, print_lines, report_errors, warn
from det_lightning.escaping import escape

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.content import CheckpointContent
    from det_lightning.checkpoint.storage.location import Location


class ExportKind(str, enum.Enum):
    """The format of an exported file."""

    weights = "weights"
    safetensors = "safetensors"
    lightning = "lightning"


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
        bool, typer.Option("--all", help="Export all complete checkpoints of a storage. Existing files are kept.")
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
        raise ValueError("--module goes with --to lightning only.")
    options = parse_options(option)
    write = functools.partial(_export_one, to=to, module=module, trusted=trusted, options=options)
    if all_:
        _export_all(checkpoint, options, pathlib.Path(output), _SUFFIXES[to], write, force=force, json=json)
        return
    file = output_file(output, force)
    left_out, program = write(locate_checkpoint(checkpoint, options), file)
    if left_out:
        warn(f"Left out, since they are not tensors: {', '.join(left_out)}")
    if json:
        print_json({"path": str(file), "bytes": file.stat().st_size, "left_out": left_out})
    else:
        print_lines([str(file)])
    for line in program.splitlines():
        typer.echo(line, err=True)


def _export_all(
    url: str,
    options: dict[str, Any],
    folder: pathlib.Path,
    suffix: str,
    write: Callable[..., Any],
    *,
    force: bool,
    json: bool,
) -> None:
    """Export each complete checkpoint into a separate file; a failed export does not stop the others."""
    from det_lightning.cli.checkpoint_locations import open_storage

    storage = open_storage(url, options)
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, list[str]] = {"exported": [], "already_there": [], "failed": []}
    for checkpoint_id in sorted(storage.list_ids()):
        file = folder / f"{checkpoint_id}{suffix}"
        if file.exists() and not force:
            summary["already_there"].append(checkpoint_id)
            continue
        try:
            write(storage.root / checkpoint_id, file)
        except errors.DetLightningError as e:
            warn(f"{checkpoint_id}: {e}")
            summary["failed"].append(checkpoint_id)
        else:
            summary["exported"].append(checkpoint_id)
    if json:
        print_json({"directory": str(folder), **summary})
    else:
        counts = ", ".join(f"{len(ids)} {name.replace('_', ' ')}" for name, ids in summary.items())
        print_lines([f"{counts}, in {folder}"])
    if summary["failed"]:
        raise typer.Exit(1)


def _export_one(
    location: Location,
    file: pathlib.Path,
    *,
    to: ExportKind,
    module: str | None,
    trusted: bool,
    options: dict[str, Any],
) -> tuple[list[str], str]:
    """Export a checkpoint; return the names of omitted entries, and a program that goes on with the file."""
    from det_lightning.checkpoint import exports  # imports torch
    from det_lightning.checkpoint.safe_load import read_checkpoint
    from det_lightning.cli.checkpoint_locations import open_local

    with open_local(location, options) as directory:
        content = read_checkpoint(directory, trusted=trusted, only_weights=to is not ExportKind.lightning)
        exports.require_tensors(content)
        if module is not None:
            with _create_module(module, content) as (created, hparams_name):
                exports.export_for_module(content, created, hparams_name, file)
                return [], _write_program(type(created), file)
        if to is ExportKind.lightning:
            exports.export_lightning(content, file)
        elif to is ExportKind.weights:
            exports.export_weights(content, file)
        else:
            return exports.export_safetensors(content, file), ""
    return [], ""


@contextlib.contextmanager
def _create_module(given: str, content: CheckpointContent) -> Iterator[tuple[Any, str | None]]:
    """Yield an object of the class ``FILE:CLASS``, and the name of a parameter for all hyperparameters, or None."""
    from det_lightning.checkpoint.format.resume_state import read_settings
    from det_lightning.importing import import_from_path

    name, _, class_name = given.rpartition(":")
    file = pathlib.Path(name)
    if file.suffix != ".py" or not class_name.isidentifier():
        raise ValueError(f"--module takes FILE:CLASS, such as module.py:MyModule; got {given!r}.")
    if not file.is_file():
        raise FileNotFoundError(f"--module {given}: there is no file {file}.")
    with import_from_path(file.parent):
        found = getattr(importlib.import_module(file.stem), class_name, None)
        if found is None:
            raise ValueError(f"--module {given}: {file} has no class {class_name}.")
        hparams = read_settings(content.resume, content.load_data)["hparams"] or {}
        parameters = inspect.signature(found).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        as_one = "hparams" in parameters and parameters["hparams"].kind is not inspect.Parameter.VAR_KEYWORD
        given_ones = {name: value for name, value in hparams.items() if takes_all or name in parameters}
        try:
            created = found(hparams=hparams) if as_one else found(**given_ones)
        except TypeError as e:
            raise ValueError(f"--module {given}: {class_name} does not take the trial's hyperparameters: {e}.") from e
        yield created, "hparams" if as_one else None


def _write_program(kind: type, file: pathlib.Path) -> str:
    uses_lightning = any(base.__module__.startswith("lightning.") for base in kind.__mro__)
    package = "lightning.pytorch" if uses_lightning else "pytorch_lightning"
    return _PROGRAM.format(package=package, module=kind.__module__, name=kind.__name__, file=escape(file))
