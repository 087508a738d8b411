"""``det-lightning checkpoint import``, ``merge``, ``annotate`` and ``prune``; torch is imported on demand."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from det_lightning import errors
from det_lightning.cli.arguments import Checkpoint, JsonFlag, Options, Storage, TrustedFlag, parse_options
from det_lightning.cli.output import print_json, print_lines, report_errors, show_progress
from det_lightning.escaping import escape
from det_lightning.files.file_kinds import require_file

if TYPE_CHECKING:
    from det_lightning.checkpoint.format.master_export import MasterExport
    from det_lightning.checkpoint.retention.pruning import PrunePlan
    from det_lightning.checkpoint.storage.annotating import Annotation
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage


@report_errors()
def import_file(
    file: Annotated[str, typer.Argument(help="Path or URL of Lightning's .ckpt file.", show_default=False)],
    storage: Storage,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Write a TrialModule's .ckpt file as a new checkpoint in Determined's format, without code, and print the id."""
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage

    options = parse_options(option)
    target = CheckpointStorage(storage, options=options)
    with _local_file(file, options) as path:
        from det_lightning.checkpoint.exports import require_tensors  # imports torch
        from det_lightning.checkpoint.format.lightning_file import from_lightning
        from det_lightning.checkpoint.safe_load import read_state

        try:
            content = from_lightning(read_state(path, trusted=trusted))
            require_tensors(content)
        except errors.InvalidCheckpointException as e:
            raise errors.InvalidCheckpointException(f"{file} cannot be imported: {e}") from e
    content.notes["imported_from"] = file.rpartition("/")[2]
    # The file does not contain the trial's code, and the working directory may hold other code.
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as empty:
        checkpoint_id = target.write(content, code=empty)
    _print_new(checkpoint_id, target, json)


@report_errors()
def merge(
    checkpoint: Checkpoint,
    storage: Annotated[
        str | None,
        typer.Argument(
            help="Storage of the new checkpoint. Defaults to the storage of the sharded checkpoint.", show_default=False
        ),
    ] = None,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Write a sharded checkpoint as a new checkpoint in Determined's format, and print the id.

    The new checkpoint has the same code, metadata and state for an exact resume. The whole state must fit into main
    memory.
    """
    from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
    from det_lightning.cli.checkpoint_locations import locate_checkpoint, open_local

    options = parse_options(option)
    location = locate_checkpoint(checkpoint, options)
    from det_lightning.checkpoint.exports import merge_checkpoint  # imports torch

    target = CheckpointStorage(storage or location.parent.url, options=options)
    with open_local(location, options, with_code=True) as directory:
        checkpoint_id = merge_checkpoint(directory, target, trusted=trusted)
    _print_new(checkpoint_id, target, json)


def _print_new(checkpoint_id: str, storage: CheckpointStorage, json: bool) -> None:
    if json:
        print_json({"uuid": checkpoint_id, "path": str(storage.root / checkpoint_id)})
    else:
        print_lines([checkpoint_id])


@contextlib.contextmanager
def _local_file(url: str, options: Mapping[str, Any]) -> Iterator[pathlib.Path]:
    from det_lightning.checkpoint.storage.location import Location, explain_errors

    location = Location.parse(url, options)
    with explain_errors(f"reading {location}"):
        if not location.exists():
            raise errors.CheckpointNotFound(f"There is no file {location}.")
        if location.is_dir():
            raise ValueError(f"{location} is a directory; import takes a .ckpt file that Lightning wrote.")
        size = int(location.fs.size(location.path) or 0)
    if location.is_local:
        yield location.local_path
        return
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        file = pathlib.Path(folder) / "file.ckpt"
        with show_progress(f"Reading {location.name}", size) as progress, explain_errors(f"reading {location}"):
            location.fs.get_file(location.path, str(file))
            progress(location.name, size)
        yield file


@report_errors()
def annotate(
    storage: Storage,
    files: Annotated[
        list[pathlib.Path],
        typer.Argument(
            metavar="FILE...",
            help="JSON that Determined's command line printed: `det experiment describe ID --json`, "
            "`det trial describe ID --json`, or the checkpoints of an experiment.",
            show_default=False,
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the changes, but write nothing.")] = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Add to checkpoints what Determined's master knew: experiment, trial, metric, hyperparameters.

    Then `checkpoint ls --best` and `checkpoint prune` use these facts. If a file contradicts a checkpoint, the command
    refuses and writes nothing.
    """
    from det_lightning.checkpoint.format.master_export import MasterExport
    from det_lightning.checkpoint.storage.annotating import carry_out_annotation, plan_annotation
    from det_lightning.cli.checkpoint_locations import open_storage

    annotated = open_storage(storage, parse_options(option))
    for file in files:
        require_file(file)
    export = MasterExport({str(file): file.read_bytes() for file in files})
    plan = plan_annotation(annotated, export)
    if not dry_run:
        carry_out_annotation(plan)
    lacking = {
        "experiments_without_metric": export.experiments_without_metric(),
        "experiments_without_checkpoints": export.experiments_without_checkpoints(),
    }
    if json:
        lists = {name: value for name, value in vars(plan).items() if name != "changes"}
        print_json({"dry_run": dry_run, **lists, **lacking})
    else:
        print_lines(_describe_annotation(plan, export))


def _describe_annotation(plan: Annotation, export: MasterExport) -> Iterator[str]:
    yield from (f"annotate {checkpoint_id}" for checkpoint_id in plan.annotated)
    yield f"{len(plan.annotated)} annotated, {len(plan.unchanged)} unchanged."
    notes = {
        "without a value of the searcher metric": plan.without_metric,
        "in the files, but not in the storage": plan.not_in_storage,
        "without a metadata.json that can be read, or behind a link: left alone": plan.unreadable,
        "in the storage, but not in the files": plan.not_in_export,
    }
    for note, ids in notes.items():
        if ids:
            yield f"{len(ids)} {note}: {', '.join(ids)}"
    for experiment_id in export.experiments_without_metric():
        command = f"det experiment describe {experiment_id} --json"
        yield f"The searcher metric of experiment {experiment_id} is in none of the files; add the output of: {command}"
    for experiment_id in export.experiments_without_checkpoints():
        command = "det trial describe TRIAL --json"
        yield f"No file names checkpoints of experiment {experiment_id}; add the output of: {command}"


@report_errors()
def prune(
    storage: Storage,
    experiment_best: Annotated[int, typer.Option(help="How many of each experiment's best checkpoints to keep.")] = 0,
    trial_best: Annotated[int, typer.Option(help="How many of each trial's best checkpoints to keep.")] = 1,
    trial_latest: Annotated[int, typer.Option(help="How many of each trial's latest checkpoints to keep.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the checkpoints, but delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Delete superfluous checkpoints by Determined's rule.

    The rule needs each checkpoint's metric and trial, which a run writes into the metadata. Checkpoints without both
    are left alone, and so are the trials of live runs on a disk with file locks. In a bucket, on SFTP and on other
    disks live runs are not seen: do not prune while runs write there. What killed runs left half-written goes, too.
    """
    from det_lightning.checkpoint.retention.policy import Retention
    from det_lightning.checkpoint.retention.pruning import carry_out, plan_pruning
    from det_lightning.cli.checkpoint_locations import open_storage

    retention = Retention(experiment_best, trial_best, trial_latest)
    pruned = open_storage(storage, parse_options(option))
    plan = plan_pruning(pruned, retention)
    if not json:
        print_lines(_describe(plan))
    deleted: list[str] = []
    if not dry_run and (yes or not plan.to_delete or _confirm(len(plan.to_delete), str(pruned))):
        deleted = carry_out(plan, pruned)
    if json:
        content = {"dry_run": dry_run, "to_delete": plan.to_delete, "deleted": deleted, "kept": plan.kept}
        print_json({**content, "in_use": plan.in_use, "of_unknown_trials": plan.unknown})
    elif not plan.to_delete and not deleted:
        print_lines(["Nothing to delete."])
    else:
        print_lines([f"{len(deleted)} deleted." if deleted or not dry_run else "Nothing deleted: a dry run."])


def _confirm(count: int, storage: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ValueError(
            f"The deletion of {count} checkpoints in {storage} needs confirmation, and there is no terminal. "
            "Use --yes to delete without confirmation, or --dry-run to list the checkpoints."
        )
    return typer.confirm(f"Delete {count} checkpoints in {escape(storage)}?", err=True)


def _describe(plan: PrunePlan) -> list[str]:
    lines = [
        f"delete {record.id}  trial {record.trial}, {record.steps_completed} steps, metric {record.metric}"
        for records in plan.by_rule.values()
        for record in records
    ]
    lines.append(f"{len(plan.kept)} kept by the rule.")
    left_alone = {
        "in use by active runs": plan.in_use,
        "written by another program, of an unknown trial": plan.unknown,
    }
    return lines + [f"{len(ids)} {why}: left alone." for why, ids in left_alone.items() if ids]
