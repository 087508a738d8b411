"""What a trial's evaluation does to its models: weights, modes, and layers that are active only in training."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.testing import recorder
from det_lightning.testing.observation.user_lines import find_user_line

# The calls that are watched; each costs a checksum of all weights.
_WATCHED_CALLS = 3
#: Functions of ``torch.nn.functional``.
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_OF_TORCH = ("feature_dropout", "native_dropout")


class EvaluationWatch:
    """Notes whether ``evaluate_batch()`` draws random numbers, and, below ``directory``, what it changes."""

    def __init__(self, directory: Path | None = None) -> None:
        self.findings: dict[str, None] = {}
        self.chosen: dict[str, None] = {}  # layers in a training mode that the evaluation itself sets
        self.draws = False
        self._directory = directory
        self.calls = 0

    @contextlib.contextmanager
    def around(self, log: recorder.TrainingLog, method: str) -> Iterator[None]:
        """Observe a call of the ``method`` of the trial of ``log``."""
        self.calls += 1
        undrawn = [recorder.random_states(), _states_after_iteration()]
        if self._directory is None or self.calls > _WATCHED_CALLS:
            yield
        else:
            weights = log.weights(log.trial)
            modes = _modes(log.trial)
            with _TrainingLayers(self._directory, method) as layers:
                yield
            for call, training in layers.seen.items():
                (self.chosen if training and not any(modes.values()) else self.findings)[call] = None
            self._compare(method, log, weights, modes)
        self.draws = self.draws or recorder.random_states() not in undrawn

    def _compare(
        self, method: str, log: recorder.TrainingLog, weights: Mapping[str, Any], modes: Mapping[str, bool]
    ) -> None:
        after = log.weights(log.trial)
        for name in (name for name in weights if weights[name] != after[name]):
            self.findings[f"{method}() changes {name}"] = None
        changed = [name for name, training in _modes(log.trial).items() if training != modes.get(name, training)]
        if changed:
            mode = "training" if _modes(log.trial)[changed[0]] else "evaluation"
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self.findings[f"{method}() leaves {changed[0]}{more} in {mode} mode"] = None


def _states_after_iteration() -> dict[str, str]:
    """Return the random states after the start of an iteration over a loader, which draws a seed for its workers."""
    with isolated_rng():
        torch.empty((), dtype=torch.int64).random_()
        return recorder.random_states()


def _modes(trial: Any) -> dict[str, bool]:
    models = recorder.named_models(trial).items()
    return {
        f"{prefix}.{name}".rstrip("."): module.training
        for prefix, model in models
        for name, module in model.named_modules()
    }


class _TrainingLayers(TorchFunctionMode):
    """Notes calls of dropouts and batch norms as in training, with the user's line."""

    def __init__(self, directory: Path, method: str) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}  # calls, and whether a module in training mode makes them
        self._directory = directory
        self._method = method

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        # Functions of torch take the probability and the mode by position, too.
        probability, training = (*args[1:3], *(None,) * 2)[:2]
        training = given.get("training", given.get("train", training))
        is_dropout = name.rstrip("_") in (*DROPOUTS, *_OF_TORCH) and training and given.get("p", probability) != 0
        if is_dropout or (name == "scaled_dot_product_attention" and given.get("dropout_p")):
            self._note("dropout")
        elif (
            name == "batch_norm"
            and given.get("training")
            and any(statistics is not None for statistics in itertools.chain(args[1:2], [given.get("running_mean")]))
        ):
            self._note("batch norm")
        return func(*args, **given)

    def _note(self, layer: str) -> None:
        line = find_user_line(self._directory) or "a line outside of the trial's files"
        self.seen[f"{line}: {layer} works as in training in {self._method}()"] = _is_of_training_module()


def _is_of_training_module() -> bool:
    """Return whether the innermost module that is being called is in training mode."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), torch.nn.Module):
            return module.training
        frame = frame.f_back
    return False
