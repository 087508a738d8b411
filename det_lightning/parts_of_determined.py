"""Decides which parts of Determined are missing, why, and what to use instead."""

from __future__ import annotations

from typing import NamedTuple

#: The release whose interface and checkpoint format are ours.
REFERENCE_VERSION = "0.38.1"

_THEIRS = "determined"
_CORE_API = (
    "it is not in the public Core API of Determined 0.38",
    "use det_lightning.core.init() and the returned context, which need no master",
)
_MASTER = (
    "it talks to a Determined master",
    "remove it, or keep such scripts apart and run them with determined while there is a master; "
    "det-lightning checkpoint lists, shows and exports checkpoints without one",
)
_INTERNAL = ("it is internal to Determined's harness", "remove it or replace it with your own code")
_ADAPTER = ("a LightningModule needs no adapter here", "pass the wrapped LightningModule to pl.Trainer")
_NATIVE = ("Determined's Native API is gone since 0.18", "train with det_lightning.pytorch.init() and Trainer")
_RANGE = (
    "ranges are not written in Python since 0.18",
    "write them into an experiment configuration, such as lr: {type: log, base: 10, minval: -4, maxval: -1}, and start "
    "det-lightning run CONFIG",
)
_PRIVATE = ("it is a private module of Determined", "import the name from det_lightning itself")
_IN_CONTAINERS = (
    "it prepares processes in Determined's containers",
    "start the script with python -m det_lightning.launch.torch_distributed or det_lightning.launch.horovod",
)
_KERAS = ("it is for TensorFlow and Keras", "rewrite the trial in PyTorch, or run it with keras's own fit()")

# Parts with a common reason: names in ``determined``.
_GROUPS = {
    _INTERNAL: (
        "CallbackTrialController EnvContext LoopTrialController TrialController _env_context "
        "_trial_controller constants estimator.EstimatorTrialController ipc monkey_patch profile "
        "pytorch.PyTorchTrialController workload"
    ),
    _RANGE: "Categorical Constant Double Integer Log",
    _NATIVE: (
        "NativeContext create create_trial_instance experimental.create experimental.create_trial_instance "
        "experimental.init_native init_native"
    ),
    _CORE_API: "_core _generic core",
    _PRIVATE: "_execution _import _info _trial _trial_context",
    _MASTER: "cli deploy experimental",
    _ADAPTER: ("experimental.pytorch_lightning pytorch._lightning pytorch.lightning pytorch_lightning"),
    _KERAS: "keras launch.tensorflow",
    _IN_CONTAINERS: "launch.horovod launch.torch_distributed launch.wrap_rank",
}
#: The reason and the replacement for each missing part; a row also applies to everything below.
MISSING_PARTS = {
    **{f"determined.{name}": why for why, names in _GROUPS.items() for name in names.split()},
    "determined": ("there is no counterpart", "remove it or replace it with your own code"),
    "determined.DistributedContext": ("it is in the Core API since 0.17", "use det_lightning.core.DistributedContext"),
    "determined.LegacyTrial": ("the common base class is gone", "use det_lightning.pytorch.PyTorchTrial"),
    "determined.RankInfo": ("ranks are in the Core API since 0.17", "use det_lightning.core.DistributedContext"),
    "determined.Trial": ("the common base class is gone", "use det_lightning.pytorch.PyTorchTrial"),
    "determined.callback": ("its callbacks were for other trials", "subclass det_lightning.pytorch.PyTorchCallback"),
    "determined.common": (
        "it is internal to Determined's tools, and most of it talks to a Determined master",
        "keep scripts that need the master (api, experimental) apart, and run them with determined while there is one; "
        "for the rest use the standard library, such as assert for check",
    ),
    "determined.common.set_logger": (
        "it only sets up the root logger",
        "call logging.basicConfig(level=logging.INFO, format=det_lightning.LOG_FORMAT)",
    ),
    "determined.errors": (
        "nothing here raises it",
        "leave out the except clause; det_lightning raises the errors of det_lightning.errors, and a CheckpointError "
        "is any error of a checkpoint",
    ),
    "determined.exec": ("it runs inside of Determined's containers", "remove it"),
    "determined.experimental.core_v2": (
        "the Core API as module attributes is not covered",
        "use `with det_lightning.core.init() as core_context:`, which has the same parts",
    ),
    "determined.gpu": ("it looks for the GPUs of an agent", "ask torch.cuda"),
    "determined.horovod": (
        "Horovod is set up for the trial, not by it",
        "use context.distributed for rank and size, and strategy='horovod' to train with Horovod",
    ),
    "determined.launch": (
        "det_lightning has no launcher of this name",
        "start the script with python -m det_lightning.launch.torch_distributed",
    ),
    "determined.launch.deepspeed": (
        "DeepSpeed's launcher is not covered",
        "python -m det_lightning.launch.torch_distributed starts processes for DDP and FSDP, and those of a "
        "transformers.Trainer with DeepSpeed",
    ),
    "determined.layers": ("it is Determined's own training loop", "remove it"),
    "determined.lightning": (
        "a LightningModule needs no adapter here",
        "pass the LightningModule itself to pl.Trainer; det_lightning.callbacks.DeterminedCheckpoint is for trials",
    ),
    "determined.load": ("it loads trials inside of Determined's containers", "import the trial's class"),
    "determined.profiler": ("its profiler reports to a Determined master", "call context.set_profiler() in a trial"),
    "determined.pytorch.deepspeed": (
        "DeepSpeedTrial is not covered",
        "write a PyTorchTrial (strategy='trial_fsdp' shards its models), or a LightningModule for "
        "pl.Trainer(strategy='deepspeed')",
    ),
    "determined.pytorch.dsat": (
        "DeepSpeed Autotune ran its trials on a Determined master",
        "remove it; det-lightning run CONFIG searches over hyperparameters, such as those of a DeepSpeed configuration",
    ),
    "determined.searcher": (
        "Determined 0.38 removed custom search methods",
        "name a searcher in the experiment configuration, such as adaptive_asha, and start det-lightning run CONFIG",
    ),
    "determined.tensorboard": (
        "it copies files for Determined's master",
        "use context.get_tensorboard_writer(), or det_lightning.callbacks.DeterminedTensorBoard",
    ),
    "determined.tensorpack": ("it is for Tensorpack", "rewrite the trial in PyTorch"),
    "determined.util": ("it is internal to Determined's tools", "use the standard library"),
}


class MissingPart(NamedTuple):
    """A missing part of Determined."""

    path: str  # its dotted name in Determined
    reason: str  # why it is missing
    advice: str  # what to use instead

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}. What to do: {self.advice}."


def missing_part(path: str) -> MissingPart:
    """Return the reason for a missing name of Determined, and the replacement."""
    return MissingPart(path, *MISSING_PARTS[find_topic(path)])


def find_topic(path: str) -> str:
    """Return the table's row for a dotted name of Determined."""
    prefix = path
    while prefix not in MISSING_PARTS:
        prefix = prefix.rpartition(".")[0] or _THEIRS
    return prefix
