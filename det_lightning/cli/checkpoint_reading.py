"""``det-lightning checkpoint ls``, ``show`` and ``verify``; torch is imported for an existing checkpoint only.

Change here: options, order and columns; the facts are read by ``det_lightning/checkpoint/storage/checkpoint_info.py``
for ``ls``, and by ``det_lightning/checkpoint/safe_load/inspection.py`` for ``show``.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from det_lightning import errors
from det_lightning.cli.arguments import Checkpoint, JsonFlag, Options, Storage, TrustedFlag, parse_options
from det_lightning.cli.output import (
    as_command_line,
    describe_age,
    describe_metric,
    pairs,
    print_json,
    print_lines,
    print_table,
    report_errors,
    warn,
)

if TYPE_CHECKING:
    from det_lightning.checkpoint.storage.checkpoint_info import CheckpointInfo
    from det_lightning.checkpoint.storage.location import Location


@report_errors()
def list_checkpoints(
    storage: Storage,
    best: Annotated[
        bool, typer.Option("--best", help="List only checkpoints with a metric, the best of each experiment first.")
    ] = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """List the checkpoints of a storage, newest first, incomplete checkpoints and links included."""
    from det_lightning.cli.checkpoint_locations import open_storage

    listed = open_storage(storage, parse_options(option))
    entries = [_entry(info) for info in listed.list_checkpoints(complete=False)]
    entries.sort(key=lambda entry: (-(entry[0]["written_s"] or 0.0), entry[0]["uuid"]))
    found = _best_first(entries) if best else [entry for entry, _ in entries]
    links = {} if best else listed.list_links()
    if json:
        content = {"storage": str(listed), "checkpoints": found}
        print_json({**content, "links": links} if links else content)
        return
    if best and entries and not found:
        warn("No complete checkpoint has a metric; `det-lightning checkpoint annotate` adds those of the master.")
        return
    _print_checkpoints(found, links, with_trial=best)


def _print_checkpoints(found: list[dict[str, Any]], links: dict[str, str], *, with_trial: bool) -> None:
    now = time.time()
    metric_names = {entry["metric"]["name"] for entry in found if entry["metric"]}
    # If all checkpoints have the same metric, the heading is its name.
    common = metric_names.pop() if len(metric_names) == 1 else None
    rows = [
        [
            entry["uuid"],
            *([entry["experiment"], entry["trial"]] if with_trial else []),
            entry["steps_completed"],
            describe_metric(entry["metric"], with_name=common is None),
            decimal(entry["size_bytes"]),
            None if entry["written_s"] is None else describe_age(now - entry["written_s"]),
            "yes" if entry["complete"] else "NO",
        ]
        for entry in found
    ]
    rows += [[f"{name} -> {target or 'unknown'}", None, None, None, None, "link"] for name, target in links.items()]
    names = ["experiment", "trial"] if with_trial else []
    print_table(["uuid", *names, ">steps", str(common or "metric"), ">size", ">age", "complete"], rows)


def _best_first(entries: list[tuple[dict[str, Any], bool]]) -> list[dict[str, Any]]:
    """Return the complete checkpoints with a numeric metric, by experiment, best first."""
    ranked = []
    for entry, smaller_is_better in entries:
        metric = entry["metric"]
        # NaN is not equal to NaN.
        if entry["complete"] and metric is not None and metric["value"] == metric["value"]:
            value = metric["value"] if smaller_is_better else -metric["value"]
            ranked.append(((entry["experiment"] or "", metric["name"] or "", value), entry))
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def _entry(info: CheckpointInfo) -> tuple[dict[str, Any], bool]:
    """Return what is known of a checkpoint, and whether smaller values of its metric are better."""
    notes = info.notes
    written = info.believable_time(time.time()) or info.written
    entry = {
        "uuid": info.id,
        "complete": info.complete,
        "steps_completed": notes.steps_completed,
        "metric": None if notes.metric is None else {"name": notes.metric_name, "value": notes.metric},
        "size_bytes": info.size_bytes,
        "written_s": written,
        "written": _as_date(written),
        "trial": notes.trial,
        "experiment": notes.experiment,
    }
    return entry, notes.smaller_is_better


def _as_date(time_s: float | None) -> str | None:
    try:
        return None if time_s is None else datetime.datetime.fromtimestamp(time_s, datetime.timezone.utc).isoformat()
    except (ValueError, OverflowError, OSError):  # a file system may return any time
        return None


@report_errors()
def show(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also name every tensor.")] = False,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Show the contents of a checkpoint, without running any code in the files."""
    from det_lightning.cli.checkpoint_locations import list_sizes, locate_checkpoint, name_checkpoint, open_local

    options = parse_options(option)
    location = locate_checkpoint(checkpoint, options)
    sizes = list_sizes(location)
    from det_lightning.checkpoint.safe_load import inspect_checkpoint  # imports torch

    with open_local(location, options) as directory:
        content = inspect_checkpoint(directory, trusted=trusted)
    problems = [as_command_line(name_checkpoint(location, directory, problem)) for problem in content["problems"]]
    if json:
        if not tensors:
            for model in content.get("models", []):
                model["tensors"] = len(model["tensors"])
        print_json({"path": str(location), "files": sizes, **content, "problems": problems})
    else:
        print_lines([f"Checkpoint {location.name}", f"  at {location}", *_overview(content), ""])
        print_table(["file", ">size"], _file_rows(sizes))
        if "models" in content:
            print_lines([""])
            print_table(["model", ">values", "types", "tensors"], _model_rows(content["models"]))
            if tensors:
                print_lines([""])
                print_table(["tensor", "type", "shape"], _tensor_rows(content["models"]))
            print_lines(["", *_training_lines(content)])
        print_lines(f"PROBLEM: {problem}" for problem in problems)
    if problems:
        raise typer.Exit(1)


def _overview(content: dict[str, Any]) -> Iterator[str]:
    load_data = content.get("load_data") or {}
    metadata = content.get("metadata") or {}
    facts = {
        "trial": load_data.get("trial_cls_spec"),
        "hparams": pairs(content["hparams"]) if content.get("hparams") else None,
        "experiment": (content.get("experiment_config") or {}).get("name"),
        "framework": metadata.get("framework") or metadata.get("torch_version"),
        "Determined": metadata.get("determined_version"),
        "metric": describe_metric(metadata.get("metric")),
        "state": pairs(content["trial_state"]) if "trial_state" in content else None,
        "complete": "yes" if content.get("complete") else "NO",
    }
    for name, value in facts.items():
        if value is not None:
            yield f"  {name + ':':<12} {value}"


def _file_rows(sizes: dict[str, int]) -> Iterator[list[Any]]:
    from det_lightning.checkpoint.format.layout import CODE_DIR

    code = {name: size for name, size in sizes.items() if name.startswith(f"{CODE_DIR}/")}
    for name, size in sizes.items():
        if name not in code:
            yield [name, decimal(size)]
    if code:
        yield [f"{CODE_DIR}/ (files: {len(code)})", decimal(sum(code.values()))]


def _model_rows(models: list[dict[str, Any]]) -> Iterator[list[Any]]:
    for index, model in enumerate(models):
        dtypes = ", ".join(f"{dtype} ({count:,})" for dtype, count in model["dtypes"].items())
        others = f", and {', '.join(model['other_entries'])}" if model["other_entries"] else ""
        yield [index, f"{model['values']:,}", dtypes, f"{len(model['tensors'])}{others}"]


def _tensor_rows(models: list[dict[str, Any]]) -> Iterator[list[Any]]:
    for index, model in enumerate(models):
        prefix = f"{index}: " if len(models) > 1 else ""
        for tensor in model["tensors"]:
            yield [prefix + tensor["name"], tensor["dtype"], " x ".join(map(str, tensor["shape"])) or "scalar"]


def _training_lines(content: dict[str, Any]) -> Iterator[str]:
    for index, optimizer in enumerate(content["optimizers"]):
        yield f"Optimizer {index}: {optimizer['groups']} parameter group(s), lr {_numbers(optimizer['lr'])}"
    for index, scheduler in enumerate(content["lr_schedulers"]):
        yield f"Scheduler {index}: last epoch {scheduler['last_epoch']}, lr {_numbers(scheduler['lr'])}"
    yield f"Callbacks with a state: {', '.join(content['callbacks']) or 'none'}"
    yield f"Random states: {', '.join(content['rng_states']) or 'none'}"
    if content["gradient_scaler"]:
        yield "Gradient scaler: yes"
    if "exact_resume" in content:
        exact = content["exact_resume"]
        yield f"Resumes: {'at the very next batch' if exact else 'as Determined does, without a position in the data'}"
    if content.get("lightning"):
        yield "Entries of Lightning: yes"


def _numbers(values: list[float | None]) -> str:
    return ", ".join("unknown" if value is None else f"{value:.6g}" for value in values) or "unknown"


@report_errors()
def verify(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT_OR_STORAGE...",
            help="Paths or URLs of checkpoints, or of storages to verify completely.",
            show_default=False,
        ),
    ],
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Check that checkpoints are complete, undamaged and safe to read, except while being written or deleted."""
    from det_lightning.cli.checkpoint_locations import locate_checkpoints

    options = parse_options(option)
    locations = [location for url in urls for location in locate_checkpoints(url, options)]
    found = {str(location): _verdict(location, options, trusted) for location in locations}
    verdicts = {path: verdict for path, verdict in found.items() if verdict is not None}
    if json:
        print_json({"checkpoints": [{"path": path, **verdict} for path, verdict in verdicts.items()]})
    else:
        rows = [_verdict_row(path, verdict) for path, verdict in verdicts.items()]
        print_table(["checkpoint", "verdict", ">files", "checksums"], rows)
        print_lines(f"Left out, as it is being written or deleted: {path}" for path in found if path not in verdicts)
        print_lines(f"PROBLEM: {problem}" for verdict in verdicts.values() for problem in verdict["problems"])
    if not all(verdict["fine"] for verdict in verdicts.values()):
        raise typer.Exit(1)


def _verdict(location: Location, options: dict[str, Any], trusted: bool) -> dict[str, Any] | None:
    """Return the problems of a checkpoint; None if a live run is still writing it, or has deleted it."""
    from det_lightning.checkpoint.safe_load import verify_checkpoint  # imports torch
    from det_lightning.checkpoint.storage.location import explain_errors
    from det_lightning.checkpoint.storage.staging import is_over, mark_of
    from det_lightning.cli.checkpoint_locations import name_checkpoint, open_local

    with explain_errors("looking for writers in", location.parent):
        mark = mark_of(location.parent, location.name)
        if mark.exists() and not is_over(mark):
            return None
    try:
        with open_local(location, options, with_code=True) as directory:
            verdict = verify_checkpoint(directory, trusted=trusted)
    except (errors.CheckpointError, OSError):
        if location.is_dir():
            raise
        return None
    problems = [as_command_line(name_checkpoint(location, directory, problem)) for problem in verdict.problems]
    if problems and not location.is_dir():
        return None
    return {"fine": not problems, **vars(verdict), "problems": problems}


def _verdict_row(path: str, verdict: dict[str, Any]) -> list[Any]:
    without = "none, as Determined writes it" if verdict["fine"] else "none"
    name = path.rpartition("/")[2]
    return [name, "fine" if verdict["fine"] else "BAD", verdict["files"], verdict["checksums"] or without]
