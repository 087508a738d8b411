"""The usual causes of a difference between two training runs, and of state that a checkpoint lacks."""

from __future__ import annotations

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
