"""A difference between two trainings, with the tolerance and the usual causes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from det_lightning.testing.records.record import TrainingRecord, shorten_repr

# Numbers may depend on these facts through no fault of the trial.
_ENVIRONMENT = ("torch", "device", "processor", "threads")
# Gradients below this share of a larger one in the same batch are nothing but float32 rounding.
_NOISE = 1e-5
_KEEP_IN_CALLBACK = "keep it in a callback, whose state_dict() returns it"

# By comparison, and by the kind of the difference or of the lost state.
_CAUSES: dict[str, dict[str, str | tuple[str, ...]]] = {
    # With the real determined.
    "reference": {
        "settings": "The two runs had different settings. Record again with the same settings.",
        "error": "One side ends with an error that does not occur on the other.",
        "number of batches": "One side stops earlier: it requests a stop, or the runs have different lengths.",
        "data": "The batches differ: in the order of the data, the split over ranks, or the transforms.",
        "epoch": "The loaders have different lengths, so epochs begin at different batches.",
        "random state": "One side draws more random numbers than the other, or seeds a generator again.",
        "learning rate": "A scheduler is stepped more or less often, or both by the trial and by the context.",
        "metric": "The loss is computed or averaged differently, or the metric depends on something else that differs.",
        "gradient": "The loss is not the loss in the metrics, is scaled differently, or its graph is cut.",
        "parameter": "The update differs: in how gradients are clipped, averaged or zeroed, or in the optimizer.",
        "buffer": "The model sees other batches, or is in another mode (train or eval), which changes buffers.",
        "validation metric": "Validation metrics are reduced differently, or the model is in another mode or was "
        "changed by a callback.",
        "callback": "A callback is called at another time, with other arguments, or not at all.",
        "callback state": "A callback has seen or kept something else.",
    },
    # Two runs with the same seed.
    "seed": {
        "data": (
            "a generator for the data that is not seeded, such as np.random.default_rng() or random.Random()",
            "worker processes of the loader that seed themselves, for example with the time",
            "files in the order in which the file system lists them (sort them), or the order of a set",
        ),
        "learning rate": "a scheduler that depends on the time",
        "any": (
            "a generator that is not seeded, such as np.random.default_rng(), or is seeded with the time",
            "a random draw that depends on the time, on a memory address, or on the order of a set",
        ),
    },
    # A resumed run and an uninterrupted one.
    "resume": {
        "data": (
            "a loader that is not a det_lightning.pytorch.DataLoader, or a sampler or dataset with a state of its own: "
            "its position is in the checkpoint only if it has state_dict() and load_state_dict(), and these hold all",
            "random draws for each sample in worker processes of the loader (num_workers above 0), whose generators "
            "are in no checkpoint: make them depend on the index and the epoch",
        ),
        "learning rate": "a scheduler that is not wrapped, or whose state_dict() is incomplete",
        "callback state": "a callback whose load_state_dict() does not restore what its state_dict() returned",
        "any": (
            "a model or optimizer that is not wrapped, and so is not in the checkpoint",
            "a random generator of the trial, whose state is not in the checkpoint",
        ),
    },
    # State that a checkpoint lacks, by the kind of object that holds it.
    "lost": {
        "model": "a model that is not wrapped: model = context.wrap_model(model)",
        "attribute of a wrapped model": "an attribute of a wrapped model that is neither a parameter nor a persistent "
        "buffer: register_buffer(...)",
        "optimizer": "an optimizer that is not wrapped: optimizer = context.wrap_optimizer(optimizer)",
        "scheduler": "a learning rate scheduler that is not wrapped: context.wrap_lr_scheduler(scheduler, step_mode)",
        "callback": "a callback that changes state which its state_dict() or load_state_dict() leaves out",
        "trial": f"an attribute of the trial that changes: {_KEEP_IN_CALLBACK}",
        "data": "data that change while they are read: make the change depend on the seed, the epoch and the index",
        "object": "an object that is not in the checkpoint: return its state from the state_dict() of a callback",
        "stateful": "an object that is not in the checkpoint: return its state_dict() from that of a callback",
        "metric": "a metric that collects over batches: return its state from the state_dict() of a callback, or let "
        "context.wrap_reducer() reset it",
        "reducer": "a reducer whose reset() does not forget what it has collected",
        "hyperparameters": f"hyperparameters that the trial changes: {_KEEP_IN_CALLBACK}",
        "environment": f"an environment variable that the trial sets: {_KEEP_IN_CALLBACK}",
        "class": f"state on a class: {_KEEP_IN_CALLBACK}",
        "module": f"a global variable that changes: {_KEEP_IN_CALLBACK}",
    },
}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far two numbers may be apart: ``|a - b| <= relative * max(|a|, |b|) + absolute``.

    If both are 0, everything must be equal to the bit. Otherwise, between environments with different kernels, only
    data, learning rates, metrics and the hooks are compared, and arrays by norm, mean, extremes and eight elements,
    relative to the largest element: rounding can turn a gradient near zero into a full step of Adam.
    """

    relative: float = 0.0
    absolute: float = 0.0
    reason: str = ""  # why this much, for reports

    @property
    def exact(self) -> bool:
        return self.relative == 0 == self.absolute

    def of(self, kind: str) -> Tolerance:
        if kind == "learning rate":
            return dataclasses.replace(self, relative=min(self.relative, 1e-6), absolute=0.0)
        return self

    def allows(self, one: float, other: float, scale: float = 0.0) -> bool:
        """Return whether two numbers, from values as large as ``scale``, count as equal; two NaNs do."""
        if one == other or (one != one and other != other):
            return True
        return abs(one - other) <= self.relative * max(abs(one), abs(other), scale) + self.absolute

    def __str__(self) -> str:
        allowed = "equal to the bit" if self.exact else f"{self.relative:.2g} relative and {self.absolute:.2g} absolute"
        return f"{allowed} ({self.reason})" if self.reason else allowed


BIT_EQUAL = Tolerance(reason="same torch, device, processor and number of threads")


def choose_tolerance(reference: TrainingRecord, ours: TrainingRecord) -> Tolerance:
    """Return the tolerance between two records: 0.1 %, or none if the environments are the same."""
    other = [name for name in _ENVIRONMENT if reference.environment.get(name) != ours.environment.get(name)]
    if not other:
        return BIT_EQUAL
    reasons = (f"{name} {reference.environment.get(name)} and {ours.environment.get(name)}" for name in other)
    return Tolerance(relative=1e-3, absolute=1e-5, reason="; ".join(reasons))


def find_cancelling_gradients(steps: Sequence[Mapping[str, float]]) -> set[str]:
    """Return the parameters whose gradient is rounding noise in every step of a training.

    The gradient is compared with those of the other parameters of the module, else of the model.
    """
    names = dict.fromkeys(name for gradients in steps for name in gradients)
    return {name for name in names if all(_cancels(name, gradients) for gradients in steps if name in gradients)}


def _cancels(name: str, gradients: Mapping[str, float]) -> bool:
    module = name.rpartition(".")[0]
    model = name.partition(".")[0]
    others = {other: size for other, size in gradients.items() if other != name}
    beside = [size for other, size in others.items() if other.rpartition(".")[0] == module]
    if not beside:
        # If it is exactly zero, with no other gradient in the module, the loss may also ignore the module.
        beside = [size for other, size in others.items() if other.partition(".")[0] == model and gradients[name]]
    largest = max(beside, default=0.0)
    return largest > 0 and gradients[name] <= _NOISE * largest


def usual_causes(comparison: str, kind: str) -> tuple[str, ...]:
    """Return the usual causes, likeliest first; ``comparison`` and ``kind`` are keys of the table."""
    causes = _CAUSES[comparison].get(kind, _CAUSES[comparison].get("any", ()))
    return (causes,) if isinstance(causes, str) else causes


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs between two trainings; ``str()`` describes all known facts."""

    kind: str  # "metric", "parameter", "data", ...: the kinds in the table above
    name: str  # of the metric, parameter, callback, ...
    batch: int | None  # its index; the number of batches if it is after the last one; None for settings
    reference: Any  # the value in the first training; None if there is none
    ours: Any  # the value in the second one
    part: str = ""  # the part of the value, such as "element 3 of 15" or "validation batch 0"
    absolute: float | None = None  # |reference - ours|, for numbers
    relative: float | None = None  # that over max(|reference|, |ours|)
    tolerance: Tolerance = BIT_EQUAL
    also: tuple[str, ...] = ()  # other differences at the same batch, such as "parameter fc.weight and 3 more"
    sides: tuple[str, str] = ("in the reference", "here")

    @property
    def likely_cause(self) -> str:
        """The usual cause of such a difference from the real determined."""
        usual = " ".join(usual_causes("reference", self.kind))
        drew = any(label.startswith("random state") for label in (f"{self.kind} {self.name}", *self.also))
        if drew and self.kind not in ("settings", "error", "number of batches"):
            return " ".join(usual_causes("reference", "random state"))
        if not self.tolerance.exact and self.kind in ("metric", "validation metric"):
            return f"{usual} Or this version of torch drops other elements: compare with dropout at 0 too."
        return usual

    def __str__(self) -> str:
        name = f"{self.kind} {self.name}" + (f" ({self.part})" if self.part else "")
        position = "" if self.batch is None else f" at batch {self.batch}"
        relative = "" if self.relative is None else f", {self.relative:.3g} relative"
        distance = "" if self.absolute is None else f" ({self.absolute:.3g} apart{relative})"
        also = f" Also different there: {', '.join(self.also)}." if self.also else ""
        return (
            f"The first difference is the {name}{position}: {shorten_repr(self.reference)} {self.sides[0]}, "
            f"{shorten_repr(self.ours)} {self.sides[1]}{distance}. Allowed: {self.tolerance}.{also}"
        )
