"""The description of a difference, and the usual causes of one, and of state that a checkpoint lacks."""

from __future__ import annotations

import dataclasses
from typing import Any

from det_lightning.testing.records.tolerance import BIT_EQUAL, Tolerance
from det_lightning.testing.records.values import shown

_KEEP_IN_CALLBACK = "keep it in a callback, whose state_dict() returns it"

# By comparison, and by the kind of thing that differs or is lost.
_CAUSES: dict[str, dict[str, str | tuple[str, ...]]] = {
    # With the real determined.
    "reference": {
        "settings": "The two runs had different settings. Record again with the same ones.",
        "error": "One side ends with an error that does not occur on the other.",
        "number of batches": "One side stops earlier: it requests a stop, or the runs have different lengths.",
        "data": "The batches differ: in the order of the data, the split over ranks, or the transforms.",
        "epoch": "The loaders have different lengths, so epochs begin at different batches.",
        "random state": "One side draws more random numbers than the other, or seeds a generator again.",
        "learning rate": "A scheduler is stepped more or less often, or both by the trial and by the context.",
        "metric": "The loss is computed or averaged differently, or the metric depends on something else that differs.",
        "gradient": "The loss is not the one that the metrics show, is scaled differently, or its graph is cut.",
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
            "a generator for the data that is not seeded: np.random.default_rng(), random.Random(), torch.Generator()",
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
            "its position is not in the checkpoint",
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
        "class": f"state on a class: {_KEEP_IN_CALLBACK}",
        "module": f"a global variable that changes: {_KEEP_IN_CALLBACK}",
    },
}


def usual_causes(comparison: str, kind: str) -> tuple[str, ...]:
    """Return the usual causes, likeliest first; ``comparison`` and ``kind`` are keys of the table."""
    causes = _CAUSES[comparison].get(kind, _CAUSES[comparison].get("any", ()))
    return (causes,) if isinstance(causes, str) else causes


@dataclasses.dataclass(frozen=True)
class Difference:
    """One value in which two trainings differ; ``str()`` describes everything known about it."""

    kind: str  # "metric", "parameter", "data", ...: the kinds in the table above
    name: str  # of the metric, parameter, callback, ...
    batch: int | None  # its index; the number of batches if it is after the last one; None for settings
    reference: Any  # the value in the first training; None if there is none
    ours: Any  # the value in the second one
    part: str = ""  # the part of the value, such as "element 3 of 15" or "validation batch 0"
    absolute: float | None = None  # |reference - ours|, for numbers
    relative: float | None = None  # that over max(|reference|, |ours|)
    ulps: int | None = None  # steps between representable numbers of the dtype, for floating-point numbers
    tolerance: Tolerance = BIT_EQUAL
    also: tuple[str, ...] = ()  # other differences at the same batch, such as "parameter fc.weight and 3 more"
    noisy_parameters: tuple[str, ...] = ()  # parameters that were not compared because their gradient is rounding noise
    rng_diverged_at: int | None = None  # the first batch with differing random states, if these were not compared
    sides: tuple[str, str] = ("in the reference", "here")

    @property
    def likely_cause(self) -> str:
        """The usual cause of a difference like this from the real determined."""
        usual = " ".join(usual_causes("reference", self.kind))
        drew = any(label.startswith("random state") for label in (f"{self.kind} {self.name}", *self.also))
        if drew and self.kind not in ("settings", "error", "number of batches"):
            return " ".join(usual_causes("reference", "random state"))
        if self.rng_diverged_at is not None:
            return (
                f"The random states differ from batch {self.rng_diverged_at} on: the versions of torch draw "
                "differently (as in dropout), or one side draws more numbers. Set dropout to 0, or use the same "
                "version."
            )
        if self.noisy_parameters:
            return (
                f"It may be rounding alone: the gradient of {', '.join(self.noisy_parameters)} is noise (a bias "
                "before a batch norm?), which optimizers like Adam turn into full steps. Allow more, or compare with "
                "the same version of torch."
            )
        if not self.tolerance.exact and self.kind in ("metric", "validation metric", "parameter"):
            return f"{usual} Or this version of torch drops other elements: compare with dropout at 0 too."
        return usual

    def __str__(self) -> str:
        name = f"{self.kind} {self.name}" + (f" ({self.part})" if self.part else "")
        position = "" if self.batch is None else f" at batch {self.batch}"
        also = f" Also different there: {', '.join(self.also)}." if self.also else ""
        return (
            f"The first difference is the {name}{position}: {shown(self.reference)} {self.sides[0]}, "
            f"{shown(self.ours)} {self.sides[1]}{self._distance()}. Allowed: {self.tolerance}.{also}"
        )

    def _distance(self) -> str:
        if self.absolute is None:
            return ""
        relative = "" if self.relative is None else f", {self.relative:.3g} relative"
        ulps = "" if self.ulps is None else f", {self.ulps:,} ULP"
        return f" ({self.absolute:.3g} apart{relative}{ulps})"
