"""What usually causes that two trainings differ, or that a resume loses state: one table for all checks."""

from __future__ import annotations

_KEEP_IN_CALLBACK = "keep it in a callback, whose state_dict() returns it"

# By what was compared, and the kind of thing that differs or is lost.
_CAUSES: dict[str, dict[str, str | tuple[str, ...]]] = {
    # With the real determined.
    "reference": {
        "settings": "The two runs were not asked to do the same. Record again with the same settings.",
        "error": "One side ends with an error that the other one does not meet.",
        "number of batches": "One side stops earlier: a stop request, or another length of the run.",
        "data": "The batches differ: another order of the data, another split over ranks, or other transforms.",
        "epoch": "The loaders have different lengths, so epochs begin at different batches.",
        "random state": "One side draws a random number more or less, or seeds again.",
        "learning rate": "A scheduler is stepped more or less often, or by the trial and by the context too.",
        "metric": "The loss is computed or averaged otherwise, or what the metric depends on differs unseen.",
        "gradient": "The loss differs from the one that the metrics show, is scaled otherwise, or its graph is cut.",
        "parameter": "The update differs: gradients that are clipped, averaged or zeroed otherwise, or another "
        "optimizer.",
        "buffer": "The model sees other batches, or is in another mode (train or eval): buffers change without an "
        "update.",
        "validation metric": "Validation metrics are reduced otherwise, or the model is in another mode or was changed "
        "by a callback.",
        "callback": "A callback is called at another time, with other arguments, or not at all.",
        "callback state": "A callback has seen or kept something else.",
    },
    # Two runs with one seed.
    "seed": {
        "data": (
            "a generator of the data that is not seeded: np.random.default_rng(), random.Random(), torch.Generator() "
            "without a seed",
            "worker processes of the loader that seed themselves, such as by the time",
            "files in the order in which the file system lists them (sort them), or the order of a set",
        ),
        "learning rate": "a scheduler that depends on the time",
        "any": (
            "a generator that is not seeded, such as np.random.default_rng(), or one that is seeded by the time",
            "a draw that depends on the time, on an address in memory, or on the order of a set",
        ),
    },
    # A resumed run with an uninterrupted one.
    "resume": {
        "data": (
            "a loader that is not a det_lightning.pytorch.DataLoader, or a sampler or dataset with a state of its own: "
            "its position is not in the checkpoint",
            "random draws for each sample in worker processes of the loader (num_workers above 0), whose generators no "
            "checkpoint has: draw by the index and the epoch",
        ),
        "learning rate": "a scheduler that is not wrapped, or whose state_dict() leaves something out",
        "callback state": "a callback whose load_state_dict() does not restore what its state_dict() returned",
        "any": (
            "a model or optimizer that is not wrapped, so that the checkpoint does not have it",
            "a random generator of the trial's own, whose state is not in the checkpoint",
        ),
    },
    # State that a checkpoint lacks, by the kind of object that holds it.
    "lost": {
        "model": "a model that is not wrapped: model = context.wrap_model(model)",
        "attribute of a wrapped model": "an attribute of a wrapped model that is neither a parameter nor a persistent "
        "buffer: register_buffer(...)",
        "optimizer": "an optimizer that is not wrapped: optimizer = context.wrap_optimizer(optimizer)",
        "scheduler": "a learning rate scheduler that is not wrapped: context.wrap_lr_scheduler(scheduler, step_mode)",
        "callback": "a callback whose state_dict() does not return, or whose load_state_dict() does not restore, what "
        "it changes",
        "trial": f"an attribute of the trial that changes: {_KEEP_IN_CALLBACK}",
        "data": "data that change while they are read: make what changes depend on the seed, the epoch and the index",
        "object": "an object that is not in the checkpoint: return its state from the state_dict() of a callback",
        "stateful": "an object that is not in the checkpoint: return its state_dict() from that of a callback",
        "class": f"state on a class: {_KEEP_IN_CALLBACK}",
        "module": f"a global variable that changes: {_KEEP_IN_CALLBACK}",
    },
}


def usual_causes(compared: str, kind: str) -> tuple[str, ...]:
    """Return the usual causes, the likeliest first.

    Args:
        compared: ``"reference"``, ``"seed"``, ``"resume"`` or ``"lost"``.
        kind: of the thing that differs, as :class:`~det_lightning.testing.records.difference.Difference` has it, or of
            the object that loses its state.
    """
    of_comparison = _CAUSES[compared]
    causes = of_comparison.get(kind, of_comparison.get("any", ()))
    return (causes,) if isinstance(causes, str) else causes
