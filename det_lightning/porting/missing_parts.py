"""What to do about the parts of Determined that det_lightning does not have."""

from __future__ import annotations

from det_lightning.porting.counterparts import counterpart
from det_lightning.porting.findings import Finding, Need, Severity

_CORE_API = (
    "it is not in the public Core API of Determined 0.38",
    "use det_lightning.core.init() and what it returns, which need no master",
)
_MASTER = (
    "it talks to a Determined master",
    "remove it, or keep such scripts apart and run them with determined while there is a master; "
    "det-lightning checkpoint lists, shows and exports checkpoints without one",
)
_KERAS = ("it is for TensorFlow and Keras", "rewrite the trial in PyTorch, or run it with keras's own fit()")

# By the longest prefix of a name.
_ADVICE = {
    "determined": ("det_lightning has no counterpart", "remove it or replace it with your own code"),
    "determined.LegacyTrial": ("the common base class is gone", "use det_lightning.pytorch.PyTorchTrial"),
    "determined.Trial": ("the common base class is gone", "use det_lightning.pytorch.PyTorchTrial"),
    "determined._core": _CORE_API,
    "determined._generic": _CORE_API,
    "determined.cli": _MASTER,
    "determined.common": ("it is internal to Determined's tools", "use the standard library; for check, use assert"),
    "determined.common.api": _MASTER,
    "determined.common.experimental": _MASTER,
    "determined.core": _CORE_API,
    "determined.deploy": _MASTER,
    "determined.estimator": _KERAS,
    "determined.exec": ("it runs inside of Determined's containers", "remove it"),
    "determined.experimental": _MASTER,
    "determined.experimental.core_v2": _CORE_API,
    "determined.experimental.create": (
        "Determined's Native API is gone since 0.18",
        "train with det_lightning.pytorch.init() and Trainer",
    ),
    "determined.gpu": ("it looks for the GPUs of an agent", "ask torch.cuda"),
    "determined.horovod": (
        "Horovod is set up for the trial, not by it",
        "use context.distributed for rank and size, and strategy='horovod' to train with Horovod",
    ),
    "determined.keras": _KERAS,
    "determined.launch": ("it is unknown", "python -m det_lightning.launch.torch_distributed"),
    "determined.launch.deepspeed": (
        "DeepSpeed's launcher is not covered",
        "python -m det_lightning.launch.torch_distributed starts processes for DDP and FSDP",
    ),
    "determined.launch.tensorflow": _KERAS,
    "determined.launch.wrap_rank": (
        "the launchers of det_lightning prefix no lines with ranks",
        "remove it; torchrun has --log-dir, --redirects and --tee for the output of ranks",
    ),
    "determined.layers": ("it is Determined's own training loop", "remove it"),
    "determined.lightning": (
        "a LightningModule needs no adapter here",
        "give the LightningModule itself to pl.Trainer; det_lightning.callbacks.DeterminedCheckpoint is for trials",
    ),
    "determined.load": ("it loads trials inside of Determined's containers", "import the trial's class"),
    "determined.pytorch.deepspeed": (
        "DeepSpeedTrial is not covered",
        "write a PyTorchTrial (strategy='trial_fsdp' shards its models), or a LightningModule for "
        "pl.Trainer(strategy='deepspeed')",
    ),
    "determined.pytorch.experimental": (
        "batch processing is not covered",
        "use pl.Trainer.predict(), or a loop over a DataLoader",
    ),
    "determined.pytorch.lightning": (
        "LightningAdapter is not needed here",
        "give the LightningModule that it wraps to pl.Trainer",
    ),
    "determined.transformers": (
        "DetCallback reports to a master",
        "use a callback of transformers for your logger (report_to=...), and its checkpoints",
    ),
    "determined.util": ("it is internal to Determined's tools", "use the standard library"),
}


def missing_part(path: str) -> str:
    """Return the shortest prefix of ``path`` that det_lightning does not have."""
    parts = path.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return next((prefix for prefix in prefixes if counterpart(prefix) is None), path)


def missing(path: str, line: int, need: Need = Need.file) -> Finding:
    """Return the finding for a use of ``path``, a dotted name of Determined that det_lightning does not have."""
    reason, advice = _ADVICE[_topic(path)]
    return Finding(line, Severity.problem, f"{path}: {reason}", advice, need)


def has_own_advice(path: str, use: str) -> bool:
    """Return whether there is other advice for ``use``, which begins with ``path``, than for all of ``path``."""
    return _topic(path) != _topic(use)


def _topic(path: str) -> str:
    prefix = path
    while prefix not in _ADVICE:
        prefix = prefix.rpartition(".")[0] or "determined"
    return prefix
