"""What usually causes that two trainings differ, or that a resume loses state: one table for all checks."""

from __future__ import annotations

_KEEP_IN_CALLBACK = "keep it in a callback, whose state_dict() returns it"

# By what was compared, and the kind of thing that differs or is lost. "reference": with the real determined; "seed":
# two runs with one seed; "resume": a resumed run with an uninterrupted one; "lost": state that a checkpoint lacks.
_CAUSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("reference", "settings"): ("The two runs were not asked to do the same. Record again with the same settings.",),
    ("reference", "error"): ("One side ends with an error that the other one does not meet.",),
    ("reference", "number of batches"): ("One side stops earlier: a stop request, or another length of the run.",),
    ("reference", "data"): (
        "The batches differ: another order of the data, another split over ranks, or other transforms.",
    ),
    ("reference", "epoch"): ("The loaders have different lengths, so epochs begin at different batches.",),
    ("reference", "random state"): ("One side draws a random number more or less, or seeds again.",),
    ("reference", "learning rate"): (
        "A scheduler is stepped more or less often, or by the trial and by the context too.",
    ),
    ("reference", "metric"): (
        "The loss is computed or averaged otherwise, or what the metric depends on differs unseen.",
    ),
    ("reference", "gradient"): (
        "The loss differs from the one that the metrics show, is scaled otherwise, or its graph is cut.",
    ),
    ("reference", "parameter"): (
        "The update differs: gradients that are clipped, averaged or zeroed otherwise, or another optimizer.",
    ),
    ("reference", "buffer"): (
        "The model sees other batches, or is in another mode (train or eval): buffers change without an update.",
    ),
    ("reference", "validation metric"): (
        "Validation metrics are reduced otherwise, or the model is in another mode or was changed by a callback.",
    ),
    ("reference", "callback"): ("A callback is called at another time, with other arguments, or not at all.",),
    ("reference", "callback state"): ("A callback has seen or kept something else.",),
    ("seed", "data"): (
        "a generator of the data that is not seeded: np.random.default_rng(), random.Random(), torch.Generator() "
        "without a seed",
        "worker processes of the loader that seed themselves, such as by the time",
        "files in the order in which the file system lists them (sort them), or the order of a set",
    ),
    ("seed", "learning rate"): ("a scheduler that depends on the time",),
    ("seed", "any"): (
        "a generator that is not seeded, such as np.random.default_rng(), or one that is seeded by the time",
        "a draw that depends on the time, on an address in memory, or on the order of a set",
    ),
    ("resume", "data"): (
        "a loader that is not a det_lightning.pytorch.DataLoader, or a sampler or dataset with a state of its own: "
        "its position is not in the checkpoint",
        "random draws for each sample in worker processes of the loader (num_workers above 0), whose generators no "
        "checkpoint has: draw by the index and the epoch",
    ),
    ("resume", "learning rate"): ("a scheduler that is not wrapped, or whose state_dict() leaves something out",),
    ("resume", "callback state"): (
        "a callback whose load_state_dict() does not restore what its state_dict() returned",
    ),
    ("resume", "any"): (
        "a model or optimizer that is not wrapped, so that the checkpoint does not have it",
        "a random generator of the trial's own, whose state is not in the checkpoint",
    ),
    ("lost", "model"): ("a model that is not wrapped: model = context.wrap_model(model)",),
    ("lost", "attribute of a wrapped model"): (
        "an attribute of a wrapped model that is neither a parameter nor a persistent buffer: register_buffer(...)",
    ),
    ("lost", "optimizer"): ("an optimizer that is not wrapped: optimizer = context.wrap_optimizer(optimizer)",),
    ("lost", "scheduler"): (
        "a learning rate scheduler that is not wrapped: context.wrap_lr_scheduler(scheduler, step_mode)",
    ),
    ("lost", "callback"): (
        "a callback whose state_dict() does not return, or whose load_state_dict() does not restore, what it changes",
    ),
    ("lost", "trial"): (f"an attribute of the trial that changes: {_KEEP_IN_CALLBACK}",),
    ("lost", "data"): (
        "data that change while they are read: make what changes depend on the seed, the epoch and the index",
    ),
    ("lost", "object"): (
        "an object that is not in the checkpoint: return its state from the state_dict() of a callback",
    ),
    ("lost", "stateful"): ("an object that is not in the checkpoint: return its state_dict() from that of a callback",),
    ("lost", "class"): (f"state on a class: {_KEEP_IN_CALLBACK}",),
    ("lost", "module"): (f"a global variable that changes: {_KEEP_IN_CALLBACK}",),
}


def usual_causes(compared: str, kind: str) -> tuple[str, ...]:
    """Return the usual causes, the likeliest first.

    Args:
        compared: ``"reference"``, ``"seed"``, ``"resume"`` or ``"lost"``.
        kind: of the thing that differs, as :class:`~det_lightning.testing.records.difference.Difference` has it, or of
            the object that loses its state.
    """
    return _CAUSES.get((compared, kind)) or _CAUSES.get((compared, "any"), ())
