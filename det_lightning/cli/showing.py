"""``det-lightning checkpoint show``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from det_lightning.checkpoint.format.layout import CODE_DIR
from det_lightning.checkpoint.safe_load import inspect_checkpoint
from det_lightning.cli.finding import find_checkpoint, list_sizes, opened, with_name_of
from det_lightning.cli.output import (
    as_command_line,
    describe_metric,
    describe_size,
    pairs,
    print_json,
    print_lines,
    print_table,
)

__all__ = ["show_checkpoint"]

# So many tensors of a model are shown unless all are asked for.
_FEW = 10


def show_checkpoint(url: str, options: Mapping[str, Any], trusted: bool, all_tensors: bool, as_json: bool) -> bool:
    """Print what a checkpoint holds; return whether all of it can be read."""
    place = find_checkpoint(url, options)
    sizes = list_sizes(place)
    with opened(place, options) as directory:
        found = inspect_checkpoint(directory, trusted=trusted)
    problems = [as_command_line(with_name_of(place, directory, problem)) for problem in found["problems"]]
    if as_json:
        print_json(_for_json({"path": str(place), "files": sizes, **found, "problems": problems}, all_tensors))
        return not problems
    print_lines([f"Checkpoint {place.name}", f"  at {place}", *_overview(found)])
    print_lines([""])
    print_table(["file", ">size"], _file_rows(sizes))
    if "models" in found:
        print_lines([""])
        print_table(["model", ">values", "types", "tensors"], _model_rows(found["models"]))
        print_lines([""])
        print_table(["tensor", "type", "shape"], _tensor_rows(found["models"], all_tensors))
        print_lines(["", *_training_lines(found)])
    print_lines(f"PROBLEM: {problem}" for problem in problems)
    return not problems


def _for_json(found: dict[str, Any], all_tensors: bool) -> dict[str, Any]:
    if not all_tensors:
        for model in found.get("models", []):
            model["tensors"] = len(model["tensors"])
    return found


def _overview(found: dict[str, Any]) -> Iterator[str]:
    load_data, metadata = found.get("load_data") or {}, found.get("metadata") or {}
    told = {
        "trial": load_data.get("trial_cls_spec"),
        "hparams": pairs(found["hparams"]) if found.get("hparams") else None,
        "experiment": (found.get("experiment_config") or {}).get("name"),
        "framework": metadata.get("framework") or metadata.get("torch_version"),
        "Determined": metadata.get("determined_version"),
        "metric": describe_metric(metadata.get("metric")),
        "state": pairs(found["trial_state"]) if "trial_state" in found else None,
        "complete": "yes" if found.get("complete") else "NO",
    }
    for name, value in told.items():
        if value is not None:
            yield f"  {name + ':':<12} {value}"


def _file_rows(sizes: dict[str, int]) -> Iterator[list[Any]]:
    code = {name: size for name, size in sizes.items() if name.startswith(f"{CODE_DIR}/")}
    for name, size in sizes.items():
        if name not in code:
            yield [name, describe_size(size)]
    if code:
        yield [f"{CODE_DIR}/ (files: {len(code)})", describe_size(sum(code.values()))]


def _model_rows(models: list[dict[str, Any]]) -> Iterator[list[Any]]:
    for index, model in enumerate(models):
        dtypes = ", ".join(f"{dtype} ({count:,})" for dtype, count in model["dtypes"].items())
        others = f", and {', '.join(model['other_entries'])}" if model["other_entries"] else ""
        yield [index, f"{model['values']:,}", dtypes, f"{len(model['tensors'])}{others}"]


def _tensor_rows(models: list[dict[str, Any]], all_tensors: bool) -> Iterator[list[Any]]:
    for index, model in enumerate(models):
        prefix = f"{index}: " if len(models) > 1 else ""
        shown = model["tensors"] if all_tensors else model["tensors"][:_FEW]
        for tensor in shown:
            yield [prefix + tensor["name"], tensor["dtype"], " x ".join(map(str, tensor["shape"])) or "scalar"]
        if len(shown) < len(model["tensors"]):
            yield [f"{prefix}... and {len(model['tensors']) - len(shown)} more (--tensors)", None, None]


def _training_lines(found: dict[str, Any]) -> Iterator[str]:
    for index, optimizer in enumerate(found["optimizers"]):
        yield f"Optimizer {index}: {optimizer['groups']} parameter group(s), lr {_numbers(optimizer['lr'])}"
    for index, scheduler in enumerate(found["lr_schedulers"]):
        yield f"Scheduler {index}: last epoch {scheduler['last_epoch']}, lr {_numbers(scheduler['lr'])}"
    yield f"Callbacks with a state: {', '.join(found['callbacks']) or 'none'}"
    yield f"Random states: {', '.join(found['rng_states']) or 'none'}"
    if found["gradient_scaler"]:
        yield "Gradient scaler: yes"
    if "exact_resume" in found:
        how = (
            "at the very next batch" if found["exact_resume"] else "as Determined does, without a position in the data"
        )
        yield f"Going on from it: {how}"
    if found.get("lightning"):
        yield "Entries of Lightning's: yes"


def _numbers(values: list[float | None]) -> str:
    return ", ".join("unknown" if value is None else f"{value:.6g}" for value in values) or "unknown"
