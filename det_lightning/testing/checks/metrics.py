"""Checks of validations and metrics: names, JSON, sums over a batch, and that a validation changes no model."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from det_lightning.core._reports import select_scalars
from det_lightning.files.plain_values import as_plain
from det_lightning.testing.checks import CheckFailed, NotCompared, list_names
from det_lightning.testing.observation.source_scan import defines, is_attribute, is_text
from det_lightning.testing.training.execution import Run
from det_lightning.testing.training.trainings import TrialRuns

# Rounding, and random numbers, make a sum over half of a batch another value than half of the sum.
_SHARE = 1e-3
_NOISY_SHARE = 0.1
_SUMS = (
    "a sum or a number of hits instead of a mean: the training loop averages over batches and processes. Return the "
    "mean, or for a validation Reducer.SUM for this metric from evaluation_reducer()"
)
_EVALUATIONS = ("evaluate_batch", "evaluate_full_dataset")
# By a moment of a validation, the hooks from then on until the next moment.
_HOOKS = {
    "start": ("on_validation_start", "on_validation_epoch_start"),
    "evaluated": ("on_validation_epoch_end", "on_validation_end"),
}


def validates(runs: TrialRuns) -> None:
    """The trial validates, and its metrics are JSON-serializable and have the same names each time."""
    run = runs.straight
    batches = [(f"batch {index}", metrics) for index, metrics in enumerate(run.observer.metrics)]
    validations = [(f"the validation after {after} batches", metrics) for after, metrics in run.observer.validations]
    _require_stable_names(runs, batches, "train_batch()")
    _require_stable_names(runs, validations, "the validation")
    if run.fails_in_validation:
        runs.require_success(run)
    runs.require(run)
    if not validations:
        raise NotCompared(f"the trial stopped after {run.record.batches} batches, without a validation")
    for when, metrics in validations:
        if wrong := list(_find_not_json(runs, metrics)):
            cause = "an object instead of its number: return float(...), or value.item() of a tensor"
            raise CheckFailed(f"Validation metrics of {when} cannot be written as JSON:", cause, details=wrong)
    searcher_metric = runs.options.get_section("searcher").get("metric")
    if searcher_metric not in (None, *validations[0][1]):
        raise CheckFailed(
            f"searcher.metric of the configuration is {searcher_metric!r}, but the validation returns "
            f"{', '.join(validations[0][1])}.",
            "a metric that was renamed only in the trial, or only in the configuration",
            details=runs.code.find(*map(is_text, validations[0][1])),
        )


def changes_nothing(runs: TrialRuns) -> list[str]:
    """A validation changes no weights, buffers or modes, and runs dropout and batch norms in evaluation mode."""
    run = runs.straight
    seen = run.observer
    changed: dict[str, dict[str, None]] = {}
    for line, functions, name in _find_changes(runs):
        changed.setdefault(f"{line}{functions} changes ", {})[name] = None
    layers = [layer for layer, is_chosen in seen.layers.items() if not is_chosen]
    changes = [f"{finding}{list_names(names)}" for finding, names in changed.items()]
    changes += [f"{_find_line(runs, name, _EVALUATIONS)}{change}" for name, change in seen.switched.items()]
    if findings := [*layers, *changes]:
        raise CheckFailed(
            "A validation changes the models, or runs layers as in training:",
            "model.train(), or a layer that is told to train, in code that validates: the training loop has called "
            "eval() before, so leave modes alone; pass training=self.training to functional.dropout()",
            "weights that are changed in a validation and not restored",
            details=findings,
        )
    runs.require(run)
    if not run.observer.validations or not seen.evaluations:
        raise NotCompared("the trial has no validation that could be observed")
    return [f"{layer}, in the mode that the trial sets and resets" for layer in seen.layers]


def grow_not(runs: TrialRuns) -> None:
    """No metric grows with the size of a batch, or with the number of batches."""
    runs.require(runs.straight)
    one, halved = (runs.halved(into) for into in (1, 2))
    samples = [*one.observer.samples[:1], *halved.observer.samples[:2]]
    is_noisy = None in samples or sum(filter(None, samples[1:]), Counter()) != samples[0]
    for name, whole, halves in _pair_metrics(one, halved):
        parts = [whole, sum(halves)]
        is_count = whole == one.observer.lengths[0] or not all(halves)
        is_setting = halves[0] == halves[1]  # such as a learning rate that is scaled by the global batch size
        if not (is_count or is_setting) and _is_same(parts, is_noisy) and abs(whole - fmean(halves)) > 0.1 * abs(whole):
            raise CheckFailed(
                f"Training metric {name!r} is a sum over the batch: {whole:.6g} in a batch, and "
                f"{' and '.join(f'{half:.6g}' for half in halves)} in its halves.",
                _SUMS,
                details=runs.code.find(is_text(name)),
            )
    validated = (one, runs.half_validation)
    for run in validated:
        if not run.observer.validations:
            runs.require(run)
    sizes = [run.observer.validation.batch_size for run in validated]
    if None in sizes or sizes[0] == sizes[1]:
        raise NotCompared("the batches of this validation cannot be halved")
    batches = [run.observer.validation.batches or 1 for run in validated]
    if batches[0] == batches[1]:
        raise NotCompared("the validation has a single sample, or its loader has no length")
    draws = one.observer.draws
    first, other = (select_scalars(run.observer.validations[0][1]) for run in validated)
    pairs = {name: [first[name], other[name]] for name in first if name in other and not math.isnan(first[name])}
    if not pairs:
        raise NotCompared("no metric of the validation is a number")
    for name, values in pairs.items():
        if all(_counts(run, value) for run, value in zip(validated, values, strict=True)):
            continue
        both = f"{values[0]:.6g} with batches of {sizes[0]}, and {values[1]:.6g} on the same samples with batches of"
        is_other = abs(values[0] - values[1]) > 0.1 * abs(values[0])
        if is_other and _is_same([value * count for value, count in zip(values, batches, strict=True)], draws):
            raise CheckFailed(
                f"Validation metric {name!r} is a sum over the batch: {both} {sizes[1]}.",
                _SUMS,
                details=runs.code.find(is_text(name)),
            )
        if is_other and _is_same([value / count for value, count in zip(values, batches, strict=True)], draws):
            raise CheckFailed(
                f"Validation metric {name!r} grows with the number of batches: {both} {sizes[1]}.",
                "a mean over each batch that is summed over the batches, as by Reducer.SUM: take Reducer.AVG, or "
                "return the sum over the batch",
                details=runs.code.find(is_text(name), is_attribute("SUM")),
            )
    if draws:
        raise NotCompared("the validation draws or seeds random numbers, and its metrics are not sums over the batch")
    if zeros := [name for name, values in pairs.items() if not any(values)]:
        others = "; no other metric is a sum over the batch" if len(zeros) < len(pairs) else ""
        raise NotCompared(f"{list_names(zeros)} of the untrained model is 0 with batches of either size{others}")


def _pair_metrics(one: Run, halved: Run) -> Iterator[tuple[str, float, list[float]]]:
    """Yield each metric of the first training batch with its values for the two halves of the batch."""
    batches = list(map(select_scalars, [*one.observer.metrics[:1], *halved.observer.metrics[:2]]))
    lengths = [*one.observer.lengths[:1], *halved.observer.lengths[:2]]
    if len(batches) == 3 and lengths[0] == sum(lengths[1:]):
        for name in batches[0]:
            whole, *halves = (metrics.get(name, math.nan) for metrics in batches)
            if whole and not math.isnan(whole + sum(halves)):
                yield name, whole, halves


def _is_same(pair: list[float], draws: bool) -> bool:
    return abs(pair[0] - pair[1]) <= (_NOISY_SHARE if draws else _SHARE) * abs(pair[0])


def _counts(run: Run, value: float) -> bool:
    """Return whether a metric counts samples or batches."""
    seen = run.observer.validation
    return value in (seen.batch_size, seen.samples, seen.batches) or value * (seen.batches or 1) == seen.samples


def _find_changes(runs: TrialRuns) -> Iterator[tuple[str, str, str]]:
    """Yield line, functions and name of each weight that a validation has changed since before its first hook."""
    seen = runs.straight.observer
    trained = {name.partition(".")[0] for name in seen.trainable if seen.trainable[name] or name in seen.with_gradient}
    for moments in seen.weights_around:
        first, last = (list(moments.values())[index] for index in (0, -1))
        for name in (name for name in last if last[name] != first.get(name)):
            pairs = itertools.pairwise(moments.items())
            moment = next(moment for (moment, one), (_, other) in pairs if one.get(name) != other.get(name))
            hooks = [hook for hook in _HOOKS.get(moment, ()) if runs.code.find(defines(hook))]
            # Hooks may also keep averaged weights or the best ones, in a model that no optimizer trains.
            if moment not in _HOOKS or name.partition(".")[0] in trained:
                functions = tuple(hooks or _HOOKS.get(moment, (moment,)))
                yield _find_line(runs, name, functions), " or ".join(f"{function}()" for function in functions), name


def _find_line(runs: TrialRuns, path: str, functions: tuple[str, ...]) -> str:
    """Return the line of ``functions`` that changes the innermost known part of ``path``, with a colon."""
    lines = runs.code.find_changes(functions)
    known = (lines[f".{part}"] for part in reversed(path.split(".")) if f".{part}" in lines)
    defined = (line.partition(": ")[0] for line in runs.code.find(*map(defines, functions)))
    return next((f"{line}: " for line in itertools.chain(known, defined)), "")


def _require_stable_names(runs: TrialRuns, reports: Sequence[tuple[str, dict[str, Any]]], source: str) -> None:
    named = [(when, set(metrics)) for when, metrics in reports if metrics]
    for when, names in named:
        first, expected = named[0]
        if names != expected:
            changes = [f"without {name!r}" for name in sorted(expected - names)]
            changes += [f"with {name!r} added" for name in sorted(names - expected)]
            raise CheckFailed(
                f"The metrics of {source} change their names: at {when} they are those of {first} "
                f"{' and '.join(changes)}.",
                "a metric that is returned only now and then; return NaN or the latest value in between",
                details=runs.code.find(*map(is_text, names ^ expected)),
            )


def _find_not_json(runs: TrialRuns, metrics: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with each metric that JSON cannot hold, with the first line that names the metric."""
    for name, metric in metrics.items():
        try:
            as_plain(metric, f"metric {name!r}")
        except TypeError as e:
            line = next((f" ({line.partition(': ')[0]})" for line in runs.code.find(is_text(name))), "")
            yield f"{str(e).removesuffix('.')}{line}"
