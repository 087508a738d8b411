"""``det-lightning checkpoint prune``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import typer

from det_lightning.checkpoint.retention.pruning import PrunePlan, carry_out, plan_pruning
from det_lightning.checkpoint.retention.rule import Retention
from det_lightning.cli.finding import open_storage
from det_lightning.cli.output import print_json, print_lines
from det_lightning.escaping import escape

__all__ = ["prune_storage"]


def prune_storage(
    url: str,
    options: Mapping[str, Any],
    retention: Retention,
    incomplete: bool,
    dry_run: bool,
    sure: bool,
    as_json: bool,
) -> None:
    """Delete what the rule does not keep, after asking, and print what."""
    storage = open_storage(url, options)
    plan = plan_pruning(storage, retention, incomplete)
    if not as_json:
        print_lines(_describe(plan))
    deleted: list[str] = []
    if plan.to_delete and not dry_run and (sure or _ask(len(plan.to_delete), str(storage))):
        deleted = carry_out(plan, storage)
    if as_json:
        print_json(_for_json(plan, deleted, dry_run))
    elif not plan.to_delete:
        print_lines(["Nothing to delete."])
    else:
        print_lines([f"{len(deleted)} deleted." if deleted or not dry_run else "Nothing deleted: a dry run."])


def _ask(count: int, storage: str) -> bool:
    if not sys.stdin.isatty():
        raise ValueError(
            f"{count} checkpoints in {escape(storage)} would be deleted, and there is no terminal to ask at. --yes "
            "deletes them, --dry-run only lists them."
        )
    return typer.confirm(f"Delete {count} checkpoints in {escape(storage)}?", err=True)


def _describe(plan: PrunePlan) -> list[str]:
    lines = [
        f"delete {record.id}  trial {index.trial}, {record.steps_completed} steps, metric {record.metric}"
        for index, ids in plan.by_rule
        for record in index.records
        if record.id in ids
    ]
    lines += [f"delete {checkpoint_id}  incomplete" for checkpoint_id in plan.incomplete]
    lines.append(f"{len(plan.kept)} kept by the rule.")
    if plan.in_use:
        lines.append(f"{len(plan.in_use)} in use by runs that go on: left alone.")
    if plan.maybe_unfinished:
        lines.append(f"{len(plan.maybe_unfinished)} incomplete, and perhaps still being written: left alone.")
    if plan.unknown:
        lines.append(f"{len(plan.unknown)} written by another program, of a trial that is not known: left alone.")
    return lines


def _for_json(plan: PrunePlan, deleted: list[str], dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "to_delete": plan.to_delete,
        "deleted": deleted,
        "kept": plan.kept,
        "in_use": plan.in_use,
        "perhaps_being_written": plan.maybe_unfinished,
        "not_in_an_index": plan.unknown,
    }
