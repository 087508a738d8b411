"""Spellings of releases 0.12 to 0.38, rewritten as the newest release has them.

Until 0.12.13 training was counted in steps of ``batches_per_step`` batches.
"""

from __future__ import annotations

from typing import Any

from det_lightning.errors import ConfigMistake
from det_lightning.experiments.config.key_paths import KeyPath, SourceLines, leaf_paths, path_text
from det_lightning.experiments.config.searchers import REFUSED_SEARCHERS
from det_lightning.experiments.config.section import shown

_BATCHES_PER_STEP = 100
# In steps, and what took their place.
_STEPS = {"max_steps": "max_length", "target_trial_steps": "max_length"}
_PERIODS = ("min_validation_period", "min_checkpoint_period")


class OlderSpellings:
    """Rewrites a configuration in place.

    Args:
        data: the configuration.
        lines: where its keys are; a key that is rewritten has the line of the old one.

    Attributes:
        notes: what was rewritten.
        mistakes: what could not be.
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

    def _move(self, old: tuple[str, ...], new: tuple[str, ...], value: Any) -> None:
        """Replace the entry ``old`` by the entry ``new``, which must have the same parent."""
        parent = self._data
        for key in old[:-1]:
            parent = parent[key]
        del parent[old[-1]]
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

    def _integer(self, path: KeyPath, value: Any) -> bool:
        if isinstance(value, int) and not isinstance(value, bool):
            return True
        self.mistakes.append(self._lines.mistake(path, f"must be an integer; got {shown(value, path[-1])}"))
        return False

    def _steps(self) -> None:
        batches_per_step = self._data.get("batches_per_step")
        if batches_per_step is None:
            self._data.pop("batches_per_step", None)
            batches_per_step = _BATCHES_PER_STEP
        elif self._integer(("batches_per_step",), batches_per_step):
            self._move(("batches_per_step",), ("scheduling_unit",), batches_per_step)
        else:
            del self._data["batches_per_step"]
            batches_per_step = _BATCHES_PER_STEP
        for name in _PERIODS:
            period = self._data.get(name)
            if isinstance(period, int) and not isinstance(period, bool):
                self._move((name,), (name,), {"batches": period * batches_per_step})
        searcher = self._data.get("searcher")
        if not isinstance(searcher, dict):
            return
        for name, new in _STEPS.items():
            if searcher.get(name) is None:
                searcher.pop(name, None)
            elif self._integer(("searcher", name), searcher[name]):
                length = {"batches": searcher[name] * batches_per_step}
                self._move(("searcher", name), ("searcher", new), length)
            else:
                del searcher[name]

    def _searcher(self) -> None:
        searcher = self._data.get("searcher")
        if not isinstance(searcher, dict):
            return
        if searcher.get("name") == "adaptive_simple":
            self._move(("searcher", "name"), ("searcher", "name"), "adaptive_asha")
        if searcher.get("stop_once") is not None and searcher.get("name") not in REFUSED_SEARCHERS:
            path = ("searcher", "stop_once")
            self.notes.append(self._lines.mistake(path, "has no effect: a trial that was stopped never goes on"))

    def _environment(self) -> None:
        environment = self._data.get("environment")
        if not isinstance(environment, dict):
            return
        for name in ("image", "environment_variables"):
            entries = environment.get(name)
            if isinstance(entries, dict) and "gpu" in entries:
                self._move(("environment", name, "gpu"), ("environment", name, "cuda"), entries["gpu"])

    def _top_level(self) -> None:
        labels = self._data.get("labels")
        if isinstance(labels, dict):
            self._move(("labels",), ("labels",), [label for label, is_set in labels.items() if is_set])
        if self._data.get("log_pattern_policies") is not None:
            self._move(("log_pattern_policies",), ("log_policies",), self._data["log_pattern_policies"])
        if self._data.get("version") == 0:
            del self._data["version"]
