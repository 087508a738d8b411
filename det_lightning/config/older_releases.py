"""Older spellings in releases from 0.12 to 0.38, rewritten to those of the newest release.

Until 0.12.13, training was counted in steps of ``batches_per_step`` batches.
"""

from __future__ import annotations

from typing import Any

from det_lightning.config.key_paths import KeyPath, SourceLines, leaf_paths, path_text
from det_lightning.config.section import shown
from det_lightning.errors import ConfigMistake

_BATCHES_PER_STEP = 100
# How long a trial trained, in steps.
_LENGTHS = ("max_steps", "target_trial_steps")
# Fields of searchers that count in steps.
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


class OlderSpellings:
    """Rewrites a configuration in place; a rewritten key has the line of the old one.

    ``notes`` says what was rewritten, and ``mistakes`` what could not be.
    """

    def __init__(self, data: dict[str, Any], lines: SourceLines) -> None:
        self._data = data
        self._lines = lines
        self.notes: list[ConfigMistake] = []
        self.mistakes: list[ConfigMistake] = []
        self._steps()
        self._searcher()
        self._environment()
        self._top_level()
        self._log_policies()

    def _move(self, old: KeyPath, new: KeyPath, value: Any) -> None:
        """Replace the entry ``old`` with the entry ``new``; the parents of both must exist. Null is the default."""
        del self._parent(old)[old[-1]]
        if value is None:
            return
        parent = self._parent(new)
        if parent.get(new[-1]) is not None:
            message = f"is the older name of {path_text(new)}, which is given, too: delete one of them"
            self.mistakes.append(self._lines.mistake(old, message))
            return
        parent[new[-1]] = value
        line = self._lines.find(old)
        for path in (new, *leaf_paths(value, new)):
            self._lines.set(path, line)
        meaning = shown(value, new[-1])
        message = f"read as {meaning}" if old == new else f"read as {path_text(new)}: {meaning}"
        self.notes.append(self._lines.mistake(old, message))

    def _parent(self, path: KeyPath) -> Any:
        parent: Any = self._data
        for key in path[:-1]:
            parent = parent[key]
        return parent

    def _steps(self) -> None:
        searcher = self._data.get("searcher")
        searcher = searcher if isinstance(searcher, dict) else {}
        batches_per_step = self._take_integer(self._data, ("batches_per_step",))
        if batches_per_step is None and not _OF_STEPS & set(searcher):
            return
        if batches_per_step is not None:
            self._move(("batches_per_step",), ("scheduling_unit",), batches_per_step)
        batches = _BATCHES_PER_STEP if batches_per_step is None else batches_per_step
        for name in _PERIODS:
            period = self._data.get(name)
            if isinstance(period, int) and not isinstance(period, bool):
                self._move((name,), (name,), {"batches": period * batches})
        for name in _LENGTHS:
            steps = self._take_integer(searcher, ("searcher", name))
            if steps is not None:
                self._move(("searcher", name), ("searcher", "max_length"), {"batches": steps * batches})

    def _take_integer(self, parent: dict[str, Any], path: tuple[str, ...]) -> int | None:
        """Return the integer at ``path``; remove any other value, and report it unless it is null."""
        value = parent.get(path[-1])
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            self.mistakes.append(self._lines.mistake(path, f"must be an integer; got {shown(value)}"))
        parent.pop(path[-1], None)
        return None

    def _searcher(self) -> None:
        searcher = self._data.get("searcher")
        if isinstance(searcher, dict) and searcher.get("name") == "adaptive_simple":
            self._move(("searcher", "name"), ("searcher", "name"), "adaptive_asha")

    def _environment(self) -> None:
        environment = self._data.get("environment")
        if not isinstance(environment, dict):
            return
        for name in ("image", "environment_variables"):
            entries = environment.get(name)
            if isinstance(entries, dict) and "gpu" in entries:
                self._move(("environment", name, "gpu"), ("environment", name, "cuda"), entries["gpu"])
        for name, argument in _OF_SCHEDULERS.items():
            section = self._data.get(name)
            if isinstance(environment.get(name), list) and isinstance(section, dict | None):
                self._data[name] = section or {}
                self._move(("environment", name), (name, argument), environment[name])

    def _top_level(self) -> None:
        labels = self._data.get("labels")
        if isinstance(labels, dict):
            self._move(("labels",), ("labels",), list(labels))
        for old, new in _RENAMED.items():
            if old in self._data:
                self._move((old,), (new,), self._data[old])
        if self._data.get("version") == 0:
            del self._data["version"]

    def _log_policies(self) -> None:
        policies = self._data.get("log_policies")
        for i, policy in enumerate(policies if isinstance(policies, list) else []):
            given = policy.get("policy", "") if isinstance(policy, dict) else ""
            if isinstance(given, dict | None):
                kind = given and given.get("type")
                action = _ACTIONS_OF_POLICIES.get(kind, kind) if isinstance(kind, str) else kind
                self._move(("log_policies", i, "policy"), ("log_policies", i, "action"), action)
