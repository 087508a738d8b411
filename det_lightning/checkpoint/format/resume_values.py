"""Whether what an exact resume needs has the types and sizes that a run can go on from."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import torch

from det_lightning import errors
from det_lightning.checkpoint.format.trial_state import MAX_COUNT, find_wrong_counts

__all__ = ["find_mistakes", "require_resume", "require_resume_complete"]

# A run has far fewer processes.
_MAX_WORLD_SIZE = 1_000_000
_MAX_SETTINGS_CHARS = 16 * 1024 * 1024

_NEEDED = ("trial_state", "rng_states", "journals", "optimizer_steps", "gradients")


def find_mistakes(resume: dict[str, Any]) -> list[str]:
    """Return which values in the content of ``resume.pth`` a run cannot go on from, a phrase each.

    Entries may be missing; only a run misses them.
    """
    mistakes = [
        f"{name!r} should be {expected}; got {_shown(resume[name])}"
        for name, (expected, is_right) in _EXPECTED.items()
        if name in resume and not is_right(resume[name])
    ]
    if mistakes:
        return mistakes
    wrong_counts = find_wrong_counts(resume.get("trial_state", {}))
    if wrong_counts is not None:
        mistakes.append(f"'trial_state' {wrong_counts}")
    world_size = resume.get("world_size")
    for name in ("rng_states", "journals"):
        if world_size is not None and name in resume and len(resume[name]) != world_size:
            mistakes.append(f"{name!r} should have an entry for each of {world_size} ranks; got {len(resume[name]):,}")
    return mistakes


def require_resume(resume: dict[str, Any], source: str) -> None:
    """Raise unless the content of ``resume.pth`` has values that a run can go on from.

    Args:
        resume: the content; entries may be missing.
        source: where it was read, for messages.

    Raises:
        IncompleteCheckpointError: values are wrong; names all of them.
    """
    mistakes = find_mistakes(resume)
    if mistakes:
        raise errors.IncompleteCheckpointError(
            f"{source} is damaged, or the file of something else: {'; '.join(mistakes)}. Use another checkpoint; "
            "without this file a run goes on as Determined does, without its position in the data."
        )


def require_resume_complete(resume: dict[str, Any], source: str) -> None:
    """Raise unless a run finds everything that it goes on from, in addition to :func:`require_resume`.

    Raises:
        IncompleteCheckpointError: entries are missing or wrong; names all of them.
    """
    require_resume(resume, source)
    mistakes = [f"{name!r} is missing" for name in _NEEDED if name not in resume]
    starts = [start for journal in resume.get("journals", []) for start in journal]
    mistakes += [
        f"'journals' should tell {name!r} of each pass over the data, {expected}; got {_shown(start.get(name))}"
        for start in starts
        for name, (expected, is_right) in _EXPECTED_OF_START.items()
        if name not in start or not is_right(start[name])
    ]
    if any(start.keys() - _EXPECTED_OF_START.keys() for start in starts):
        mistakes.append(f"'journals' should tell {', '.join(_EXPECTED_OF_START)} of each pass, and nothing else")
    if mistakes:
        raise errors.IncompleteCheckpointError(f"{source} is damaged: {'; '.join(mistakes):.2000}.")


def _shown(value: Any) -> str:
    try:
        return f"{reprlib.repr(value):.200}" if not isinstance(value, torch.Tensor) else "a tensor"
    except ValueError:  # an integer with more digits than Python prints
        return f"a very large {type(value).__name__}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_world_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_WORLD_SIZE


def _is_settings(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= _MAX_SETTINGS_CHARS)


def _is_rng_states(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _is_pass_start(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("first_batch", 0))


def _is_journals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(journal, list) and all(map(_is_pass_start, journal)) for journal in value)
    )


def _is_gradients(value: Any) -> bool:
    """Tell whether a value is a list of the gradients of each model, or such a list of each rank."""
    return isinstance(value, list) and (all(map(_is_of_model, value)) or all(map(_is_of_rank, value)))


def _is_of_rank(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_of_model, value))


def _is_of_model(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(gradient, torch.Tensor) for name, gradient in value.items()
    )


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "trial_state": ("a dict of counts", lambda value: isinstance(value, dict)),
    "rng_states": ("a list with a dict of random states for each rank", _is_rng_states),
    "journals": ("a list, for each rank, of how passes over the data began", _is_journals),
    "optimizer_steps": (f"an integer from 0 to {MAX_COUNT}", _is_count),
    "gradients": ("a list of dicts of tensors", _is_gradients),
    "precision": ("a dict", lambda value: isinstance(value, dict)),
    "world_size": (f"an integer from 1 to {_MAX_WORLD_SIZE}", _is_world_size),
    "settings": ("a text of JSON", _is_settings),
    "best_value": ("a number", lambda value: isinstance(value, int | float | None)),
    "trial": ("a name", lambda value: isinstance(value, str | None)),
}

_EXPECTED_OF_START: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "first_batch": ("an integer", _is_count),
    "rng": ("a dict", lambda value: isinstance(value, dict)),
    "samplers": (
        "a list of dicts",
        lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
    ),
}
