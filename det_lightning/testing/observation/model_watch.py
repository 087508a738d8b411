"""Watches of a trial's models: changes by validations, modes, and layers with an effect only in training."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from det_lightning.pytorch._random_state import isolated_rng
from det_lightning.testing import recorder
from det_lightning.testing.training.trial_source import find_user_line

# The number of evaluations to watch; each costs a checksum of all weights.
_WATCHED_CALLS = 3
#: Functions of ``torch.nn.functional``.
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_OF_TORCH = ("feature_dropout", "native_dropout")


class ModeWatch:
    """Notes modules that train in an evaluation mode left on by earlier code."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._findings: dict[str, tuple[int, list[str]]] = {}  # by line: the first batch, and the modules
        self._entered: dict[nn.Module, int] = {}  # the latest batch that called a module
        self._trained: set[nn.Module] = set()  # modules that a batch called first in training mode
        self._left_on: dict[nn.Module, tuple[str, bool]] = {}  # the user's line, and whether a batch executed the line
        self._reset: set[nn.Module] = set()  # modules left in evaluation mode until the training loop reset the mode

    @property
    def findings(self) -> list[str]:
        return [
            f"{line}: evaluation mode is left on, in which {shorten_names(names)} trains from batch {batch} on"
            for line, (batch, names) in self._findings.items()
        ]

    @contextlib.contextmanager
    def around(self, log: recorder.TrainingLog) -> Iterator[None]:
        """Watch a training that ``log`` records."""
        original = nn.Module.train

        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            self._switch(log, module, mode)
            return original(module, mode)

        hook = register_module_forward_pre_hook(lambda module, _: self._enter(log, module))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Module, "train", train)
            try:
                yield
            finally:
                hook.remove()
                for modules in (self._entered, self._trained, self._left_on, self._reset):
                    modules.clear()

    def _switch(self, log: recorder.TrainingLog, module: nn.Module, mode: bool) -> None:
        line = find_user_line(self._directory, beyond_context=True)
        if line is None:
            # Only by chance does the training loop reset a mode right after the batch that left the mode on.
            if module in self._left_on:
                if module.training or not self._left_on[module][1]:
                    del self._left_on[module]
                else:
                    self._reset.add(module)
            return
        self._left_on.pop(module, None)
        self._reset.discard(module)
        was_trained = self._entered.get(module) == log.batches and module in self._trained
        if not mode and (was_trained or not _is_in_batch(log)):
            self._left_on[module] = (line, _is_in_batch(log))

    def _enter(self, log: recorder.TrainingLog, module: nn.Module) -> None:
        if not _is_in_batch(log) or self._entered.get(module) == log.batches or not _depends_on_mode(module):
            return
        self._entered[module] = log.batches
        if module in self._left_on and module in self._trained and (not module.training or module in self._reset):
            names = {id(part): name for name, part in _collect_modules(log.trial).items()}
            _, modules = self._findings.setdefault(self._left_on[module][0], (log.batches, []))
            if (name := names.get(id(module), type(module).__name__)) not in modules:
                modules.append(name)
        if module.training:
            self._trained.add(module)


def shorten_names(names: list[str]) -> str:
    """Return the first name, with the number of further names."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _is_in_batch(log: recorder.TrainingLog) -> bool:
    return bool(log.events) and log.events[-1]["event"] == "batch_start"


def _depends_on_mode(module: nn.Module) -> bool:
    """Return whether the forward pass of a module, for example a dropout, reads the mode."""
    # A scripted module has no forward of Python.
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    probability = getattr(module, "p", getattr(module, "dropout", None))
    is_off = isinstance(probability, int | float) and probability == 0
    return code is not None and "training" in code.co_names and not is_off


class EvaluationWatch:
    """Notes random draws of ``evaluate_batch()`` and, given a ``directory`` of code, changes of the models."""

    def __init__(self, directory: Path | None = None) -> None:
        self.findings: dict[str, None] = {}
        self.changes: dict[str, str] = {}  # findings by the name of a changed weight or module
        self.chosen: dict[str, None] = {}  # layers in a training mode that the evaluation itself sets
        self.draws = False
        self.calls = 0
        self.modes = ModeWatch(directory or Path())
        self._directory = directory

    @contextlib.contextmanager
    def around(self, log: recorder.TrainingLog, method: str) -> Iterator[None]:
        """Observe a call of the ``method`` of the trial of ``log``."""
        self.calls += 1
        undrawn = [recorder.random_states(), _states_after_iteration()]
        if self._directory is None or self.calls > _WATCHED_CALLS:
            yield
        else:
            weights = log.weights(log.trial)
            modes = _read_modes(log.trial)
            with _TrainingLayers(self._directory, method) as layers:
                yield
            for call, training in layers.seen.items():
                (self.chosen if training and not any(modes.values()) else self.findings)[call] = None
            after = log.weights(log.trial)
            changed = [name for name, weight in weights.items() if weight != after[name]]
            self.changes |= {name: f"{method}() changes {name}" for name in changed}
            after_modes = _read_modes(log.trial)
            if switched := [name for name, mode in after_modes.items() if mode != modes.get(name, mode)]:
                mode = "training" if after_modes[switched[0]] else "evaluation"
                self.changes[switched[0]] = f"{method}() leaves {shorten_names(switched)} in {mode} mode"
        self.draws = self.draws or recorder.random_states() not in undrawn


def _states_after_iteration() -> dict[str, str]:
    """Return the random states after the draw of a seed for workers at the start of a loader's iteration."""
    with isolated_rng():
        torch.empty((), dtype=torch.int64).random_()
        return recorder.random_states()


def _collect_modules(trial: Any) -> dict[str, nn.Module]:
    models = recorder.find_models(trial).items()
    return {name: module for prefix, model in models for name, module in model.named_modules(prefix=prefix)}


def _read_modes(trial: Any) -> dict[str, bool]:
    return {name: module.training for name, module in _collect_modules(trial).items()}


class _TrainingLayers(TorchFunctionMode):
    """Notes dropouts and batch norms that work as in training, with the user's lines."""

    def __init__(self, directory: Path, method: str) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}  # by call: whether the module of the call is in training mode
        self._directory = directory
        self._method = method

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        # Functions of torch also take the probability and the mode by position.
        probability, training = (*args[1:3], *(None,) * 2)[:2]
        training = given.get("training", given.get("train", training))
        is_dropout = name.rstrip("_") in (*DROPOUTS, *_OF_TORCH) and training and given.get("p", probability) != 0
        if is_dropout or (name == "scaled_dot_product_attention" and given.get("dropout_p")):
            self._note_layer("dropout")
        elif (
            name == "batch_norm"
            and given.get("training")
            and any(statistics is not None for statistics in itertools.chain(args[1:2], [given.get("running_mean")]))
        ):
            self._note_layer("batch norm")
        return func(*args, **given)

    def _note_layer(self, layer: str) -> None:
        line = find_user_line(self._directory) or "a line outside of the trial's files"
        self.seen[f"{line}: {layer} works as in training in {self._method}()"] = _is_of_training_module()


def _is_of_training_module() -> bool:
    """Return whether the innermost module that is being called is in training mode."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return next((owner.training for owner in owners if isinstance(owner, nn.Module)), False)
