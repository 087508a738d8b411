"""Rewrites spellings of the releases from 0.12 on to those of 0.38.

Until 0.12.13, training was counted in steps of ``batches_per_step`` batches.
"""

from __future__ import annotations

from typing import Any

from det_lightning.config.document import Document, KeyPath, leaf_paths, path_text
from det_lightning.config.section import show_value
from det_lightning.masking import mask_config

_BATCHES_PER_STEP = 100
# How long a trial trained, in steps.
_LENGTHS = ("max_steps", "target_trial_steps")
# Fields of searchers in steps.
_OF_STEPS = {*_LENGTHS, "step_budget", "steps_per_round"}
_RENAMED = {"integration": "integrations", "log_pattern_policies": "log_policies"}
# Log policies once had a ``policy`` in place of an ``action``; the last kind sent a webhook, and did nothing else.
_ACTIONS_OF_POLICIES = {
    "on_failure_dont_retry": "cancel_retries",
    "on_failure_exclude_node": "exclude_node",
    "send_webhook": None,
}
_PERIODS = ("min_validation_period", "min_checkpoint_period")
# Until 0.19, the arguments of the schedulers' commands were lists below ``environment``.
_OF_SCHEDULERS = {"slurm": "sbatch_args", "pbs": "pbsbatch_args"}


def rewrite_older_spellings(document: Document) -> None:
    """Rewrite old spellings in place, note each change, and report mistakes.

    A rewritten key has the line of the old key.
    """
    searcher = document.data.get("searcher")
    searcher = searcher if isinstance(searcher, dict) else {}
    _rewrite_steps(document, searcher)
    if searcher.get("name") == "adaptive_simple":
        _move(document, ("searcher", "name"), ("searcher", "name"), "adaptive_asha")
    if isinstance(document.data.get("environment"), dict):
        _rewrite_environment(document, document.data["environment"])
    if isinstance(labels := document.data.get("labels"), dict):
        _move(document, ("labels",), ("labels",), list(labels))
    for old, new in _RENAMED.items():
        if old in document.data:
            _move(document, (old,), (new,), document.data[old])
    if document.data.get("version") == 0:
        del document.data["version"]
    _rewrite_log_policies(document)


def _move(document: Document, old: KeyPath, new: KeyPath, value: Any) -> None:
    """Replace the entry ``old`` with the entry ``new``; the parents of both must exist. Null is the default."""
    del document.find_parent(old)[old[-1]]
    if value is None:
        return
    parent = document.find_parent(new)
    if parent.get(new[-1]) is not None:
        message = f"is the older name of {path_text(new)}, which is also set: delete one of the two"
        document.mistakes.append(document.lines.mistake(old, message))
        return
    parent[new[-1]] = value
    document.lines.update(dict.fromkeys([new, *leaf_paths(value, new)], document.lines.find(old)))
    meaning = show_value(mask_config(value, new))
    message = f"read as {meaning}" if old == new else f"read as {path_text(new)}: {meaning}"
    document.notes.append(document.lines.mistake(old, message))


def _rewrite_steps(document: Document, searcher: dict[str, Any]) -> None:
    batches_per_step = _take_integer(document, document.data, ("batches_per_step",))
    if batches_per_step is None and not _OF_STEPS & set(searcher):
        return
    if batches_per_step is not None:
        _move(document, ("batches_per_step",), ("scheduling_unit",), batches_per_step)
    batches = _BATCHES_PER_STEP if batches_per_step is None else batches_per_step
    for name in _PERIODS:
        period = document.data.get(name)
        if isinstance(period, int) and not isinstance(period, bool):
            _move(document, (name,), (name,), {"batches": period * batches})
    for name in _LENGTHS:
        steps = _take_integer(document, searcher, ("searcher", name))
        if steps is not None:
            _move(document, ("searcher", name), ("searcher", "max_length"), {"batches": steps * batches})


def _take_integer(document: Document, parent: dict[str, Any], path: tuple[str, ...]) -> int | None:
    """Return the integer at ``path``. Remove any other value, and report a value other than null."""
    value = parent.get(path[-1])
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if value is not None:
        document.mistakes.append(document.lines.mistake(path, f"must be an integer; got {show_value(value)}"))
    parent.pop(path[-1], None)
    return None


def _rewrite_environment(document: Document, environment: dict[str, Any]) -> None:
    for name in ("image", "environment_variables"):
        entries = environment.get(name)
        if isinstance(entries, dict) and "gpu" in entries:
            _move(document, ("environment", name, "gpu"), ("environment", name, "cuda"), entries["gpu"])
    for name, argument in _OF_SCHEDULERS.items():
        section = document.data.get(name)
        if isinstance(environment.get(name), list) and isinstance(section, dict | None):
            document.data[name] = section or {}
            _move(document, ("environment", name), (name, argument), environment[name])


def _rewrite_log_policies(document: Document) -> None:
    policies = document.data.get("log_policies")
    for i, policy in enumerate(policies if isinstance(policies, list) else []):
        given = policy.get("policy", "") if isinstance(policy, dict) else ""
        if isinstance(given, dict | None):
            kind = given and given.get("type")
            action = _ACTIONS_OF_POLICIES.get(kind, kind) if isinstance(kind, str) else kind
            _move(document, ("log_policies", i, "policy"), ("log_policies", i, "action"), action)
