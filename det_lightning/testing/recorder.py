#!/usr/bin/env python
"""Trains a Determined trial for a few batches, and writes samples, metrics, norms of gradients and weights as JSON.

Copy this file to the environment whose training is the reference. The recorder needs nothing but ``determined``
(0.21 or later) and runs on Python 3.8::

    python recorder.py model_def:MyTrial --config const.yaml --hparams '{"lr": 0.1}' --batches 20 --output ref.json

The exit status is 0, or 2 if nothing could be recorded. An error in training becomes part of the record. A
trial that imports ``det_lightning`` gets ``determined`` under this name.

Numbers are exact; NaN and Infinity, which JSON lacks, have Python's spelling.
"""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import copy
import enum
import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import json
import os
import pathlib
import platform
import random
import sys
import tempfile
import traceback
from types import ModuleType
from typing import Any, Callable, Sequence

FORMAT = "det-lightning training record"
VERSION = 1
SAMPLED_ELEMENTS = 8

#: The hooks to record, with functions that choose the facts about their arguments.
HOOKS: dict[str, Callable[..., Any]] = {
    "on_trial_startup": lambda first_batch_idx, checkpoint_uuid: {"first_batch_idx": first_batch_idx},
    "on_training_epoch_start": lambda *epoch_idx: {"epoch_idx": epoch_idx[0] if epoch_idx else None},
    "on_training_epoch_end": lambda *epoch_idx: {"epoch_idx": epoch_idx[0] if epoch_idx else None},
    "on_training_workload_end": lambda avg_metrics, batch_metrics: {
        # Later versions of Determined add these two.
        "avg_metrics": describe({n: v for n, v in avg_metrics.items() if n not in ("batches", "epochs")}),
        "batches": len(batch_metrics),
    },
    "on_validation_epoch_end": lambda outputs: {"outputs": describe(outputs)},
    **dict.fromkeys(
        ["on_trial_shutdown", "on_training_start", "on_validation_start", "on_validation_epoch_start",
         "on_validation_end", "on_checkpoint_save_start", "on_checkpoint_load_start", "on_checkpoint_write_end",
         "on_checkpoint_upload_end"],
        lambda *arguments: {},
    ),
}  # fmt: skip


def describe(value: Any) -> Any:
    """Turn a value into JSON: numbers exactly, arrays as a digest, statistics and some elements."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, collections.abc.Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    array, dtype = as_array(value)
    if array is not None:
        return describe(array.tolist()) if array.dtype.kind == "O" else _describe_array(array, dtype)
    described: dict[str, Any] = {"~": "object", "class": type(value).__name__}
    if isinstance(value, (set, frozenset)):
        value = sorted(map(repr, value))
    if isinstance(value, (bytes, int, float, complex, enum.Enum, list)):
        described["digest"] = _digest(repr(value).encode())
    return described


def as_array(value: Any) -> Any:
    """Return a tensor, array or numpy scalar as an array and the name of its dtype; None for anything else."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor) and not is_lazy(value):
        dtype = str(value.dtype).replace("torch.", "")
        tensor = value.detach().cpu()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.is_complex() and hasattr(tensor, "resolve_conj"):
            tensor = tensor.resolve_conj()
        try:
            return tensor.numpy(), dtype
        except (RuntimeError, TypeError):  # bfloat16, which numpy lacks, fits into float32
            return tensor.float().numpy(), dtype
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value), str(value.dtype)
    return None, ""


def is_lazy(value: Any) -> bool:
    """Return whether a parameter or buffer has no shape until the first forward pass."""
    return type(value).__name__.startswith("Uninitialized")


def _describe_array(array: Any, dtype: str) -> dict[str, Any]:
    import numpy as np

    is_numeric = array.dtype.kind in "fiub"
    if is_numeric and array.ndim == 0:
        return {"~": "number", "dtype": dtype, "value": array.item()}
    described: dict[str, Any] = {"~": "array", "dtype": dtype, "shape": list(array.shape)}
    described["digest"] = _digest(array.tobytes())
    if is_numeric and array.size:
        numbers = array.astype(np.float64).ravel()
        sampled = np.linspace(0, numbers.size - 1, min(SAMPLED_ELEMENTS, numbers.size)).astype(int)
        described.update(
            norm=float(np.sqrt(np.square(numbers).sum())),
            mean=float(numbers.mean()),
            minimum=float(numbers.min()),
            maximum=float(numbers.max()),
            sample=[float(number) for number in numbers[sampled]],
        )
    return described


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def random_states() -> dict[str, str]:
    """Return a digest of each global random generator's state."""
    import numpy as np
    import torch

    numpys: Any = np.random.get_state()
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": numpys[1].tobytes() + repr(numpys[2:]).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {name: _digest(state) for name, state in states.items()}


class TrainingLog:
    """Records the events of one training."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.batches = 0  # trained so far
        self.trial: Any = None
        self.context: Any = None
        self.callbacks: dict[str, Any] = {}  # the trial's own
        self._described: dict[str, dict[str, Any]] = {}
        self._gradients: dict[str, float] = {}

    def begin(self, trial: Any, context: Any) -> None:
        """Note the trial and its context before the trial's constructor runs."""
        self.trial = trial
        self.context = context

    def add(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "batch": self.batches, **fields})

    def hook(self, name: str, arguments: dict[str, Any], given: Sequence[Any]) -> None:
        """Record the call of a hook, with the facts ``arguments`` about the arguments ``given``."""
        if name == "on_trial_startup":
            self.batches = given[0]
        self.add("callback", name=name, arguments=arguments)
        if name == "on_validation_end":
            self.add("validation", metrics=describe(given[0]))

    def start(self, trial: Any) -> None:
        trainable = {}
        for prefix, model in find_models(trial).items():
            for name, parameter in model.named_parameters():
                trainable[f"{prefix}.{name}"] = parameter.requires_grad
                if parameter.requires_grad and not is_lazy(parameter):
                    parameter.register_hook(functools.partial(self._add_gradient, f"{prefix}.{name}"))
        self.add("start", parameters=trainable, weights=self.weights(trial), random=random_states())

    def _add_gradient(self, name: str, gradient: Any) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        self._gradients[name] = self._gradients.get(name, 0.0) + float(values.detach().double().norm())

    def batch_start(self, trial: Any, batch: Any, epoch: Any) -> None:
        self._gradients = {}
        rates = learning_rates(trial)
        self.add("batch_start", epoch=epoch, data=describe(batch), learning_rates=rates, random=random_states())

    def batch_end(self, trial: Any, metrics: Any) -> None:
        metrics = describe(metrics if isinstance(metrics, dict) else {"loss": metrics})
        gradients = dict(sorted(self._gradients.items()))
        self.add("batch_end", metrics=metrics, gradients=gradients, weights=self.weights(trial), random=random_states())
        self.batches += 1

    def end(self, trial: Any) -> None:
        states = {name: describe(callback.state_dict()) for name, callback in self.callbacks.items()}
        rates = learning_rates(trial)
        self.add("end", weights=self.weights(trial), learning_rates=rates, callbacks=states, random=random_states())

    def weights(self, trial: Any) -> dict[str, Any]:
        """Describe the parameters and buffers of all models; only tensors that changed are measured again."""
        for prefix, model in find_models(trial).items():
            for name, value in model.state_dict().items():
                array, _ = as_array(value)
                known = self._described.get(f"{prefix}.{name}", {})
                if array is None or array.ndim == 0 or known.get("digest") != _digest(array.tobytes()):
                    self._described[f"{prefix}.{name}"] = describe(value)
        return dict(self._described)


def find_models(trial: Any) -> dict[str, Any]:
    """Return the wrapped models by their attribute names in the trial, or by number."""
    attributes = {id(value): name for name, value in reversed(list(vars(trial).items()))}
    models = {}
    for number, model in enumerate(trial.context.models):
        name = attributes.get(id(model), f"models[{number}]")
        parallel = type(model).__name__.endswith(("DataParallel", "DDP"))
        models[name] = getattr(model, "module", model) if parallel else model
    return models


def learning_rates(trial: Any) -> list[list[float]]:
    """Return the learning rate of each parameter group of each wrapped optimizer."""
    return [
        [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        for optimizer in trial.context.optimizers
    ]


def make_callback(api: Any, log: TrainingLog) -> Any:
    """Return a callback that records the calls of each hook of this release of Determined."""

    def hook(name: str, essentials: Callable[..., Any]) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> None:
            given = (*args, *kwargs.values())
            log.hook(name, essentials(*given), given)

        return functools.wraps(getattr(api.PyTorchCallback, name))(method)

    methods = {name: hook(name, essentials) for name, essentials in HOOKS.items() if hasattr(api.PyTorchCallback, name)}
    return type("RecordingCallback", (api.PyTorchCallback,), methods)()


def record_trial(trial_class: Any, api: Any, log: TrainingLog) -> Any:
    """Return a subclass of the trial, which records batches and callbacks in ``log``."""

    def init(self: Any, context: Any, *args: Any, **kwargs: Any) -> None:
        log.begin(self, context)
        trial_class.__init__(self, context, *args, **kwargs)
        if not hasattr(self, "context"):
            self.context = context

    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("batch", "epoch_idx", "batch_idx"), args), **kwargs)
        log.batch_start(self, given.get("batch"), given.get("epoch_idx"))
        metrics = trial_class.train_batch(self, *args, **kwargs)
        log.batch_end(self, metrics)
        return metrics

    def build_callbacks(self: Any) -> Any:
        if not log.events:
            log.start(self)
        callbacks = trial_class.build_callbacks(self)
        if not isinstance(callbacks, dict):
            return callbacks  # the training loop raises
        log.callbacks = callbacks
        return {"det_lightning_recorder": make_callback(api, log), **callbacks}

    overrides: dict[str, Any] = {"__init__": init, "train_batch": train_batch, "build_callbacks": build_callbacks}
    methods = {name: functools.wraps(getattr(trial_class, name))(method) for name, method in overrides.items()}
    return name_like(trial_class, type(trial_class.__name__, (trial_class,), methods))


def name_like(original: Any, made: type) -> type:
    """Give the class ``made`` the names and the docstring of ``original``."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(made, name, getattr(original, name))
    return made


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def copy_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for one run; the trial may change its hyperparameters and its configuration."""
    arguments = {n: copy.deepcopy(v) if n == "hparams" else v for n, v in settings["arguments"].items()}
    copies = copy.deepcopy({name: settings[name] for name in ("hparams", "config")})
    return {**settings, **copies, "arguments": arguments}


def train(
    trial_class: Any, api: Any, settings: dict[str, Any], log: TrainingLog, more: dict[str, Any] | None = None
) -> None:
    """Train with the ``init`` and ``Trainer`` of ``api``.

    ``trial_class`` comes from :func:`record_trial`; ``more`` holds further arguments of ``"init"``, ``"Trainer"`` and
    ``"fit"``, which override the settings.
    """
    given = {"init": {}, "Trainer": {}, "fit": {}, **(more or {})}
    settings = copy_settings(settings)
    config = settings["config"]
    wanted = {
        "hparams": settings["hparams"],
        "exp_conf": config,
        "aggregation_frequency": settings["aggregation_frequency"],
        "enable_tensorboard_logging": False,
        **given["init"],
    }
    schedule = {
        "max_length": api.Batch(settings["batches"]),
        **{name: api.Batch(settings[name]) for name in ("validation_period", "reporting_period")},
        "checkpoint_policy": "none",
        **given["fit"],
    }
    known = inspect.signature(api.init).parameters
    seed_all(settings["seed"])
    with api.init(**{name: value for name, value in wanted.items() if name in known}) as context:
        # On a cluster, Determined tells the context whether aggregated gradients are averaged.
        average = ((config or {}).get("optimizations") or {}).get("average_aggregated_gradients", True)
        if not average and hasattr(context, "_set_default_average_aggregated_gradients"):
            context._set_default_average_aggregated_gradients(False)
        trial = trial_class(context, **settings["arguments"])
        log.start(trial)
        try:
            api.Trainer(trial, context, **given["Trainer"]).fit(**schedule)
        finally:
            log.end(trial)


def describe_error(error: BaseException) -> dict[str, str]:
    """Return an error as it is recorded, without the frames of this file."""
    if isinstance(error, SystemExit):  # Determined turns some errors, such as InvalidHP, into the end of the process
        error = error.__context__ or error
    frames = traceback.extract_tb(error.__traceback__)
    below = [frame for frame in frames if frame.filename != __file__]
    lines = [*traceback.format_list(below), *traceback.format_exception_only(type(error), error)]
    return {"type": type(error).__name__, "message": str(error), "traceback": "".join(lines)}


def environment(side: str) -> dict[str, Any]:
    """Return the facts that numbers may depend on: versions, machine, number of threads."""
    import numpy
    import torch

    api = importlib.import_module(f"{side}.pytorch")
    return {
        "side": side,
        side: str(getattr(importlib.import_module(side), "__version__", "unknown")),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(numpy.__version__),
        "platform": platform.platform(),
        "processor": _read_processor(),
        "threads": torch.get_num_threads(),
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "hooks": [name for name in HOOKS if hasattr(api.PyTorchCallback, name)],
    }


def _read_processor() -> str:
    with contextlib.suppress(OSError):  # not Linux
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make_record(
    side: str, spec: str, settings: dict[str, Any], log: TrainingLog, training: Callable[[], None]
) -> dict[str, Any]:
    """Call ``training``, and return the record, which includes an error of the training."""
    error = None
    try:
        training()
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # Determined's own errors are not all of class Exception
        error = describe_error(raised)
    record = {"format": FORMAT, "version": VERSION, "trial": spec, "settings": settings}
    return {**record, "environment": environment(side), "batches": log.batches, "error": error, "events": log.events}


class CannotRecord(Exception):
    """There is nothing to train, for the reason in the message."""


class _DeterminedAsDetLightning(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports ``determined`` under the name ``det_lightning``, for trials that are ported already."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        top, _, rest = fullname.partition(".")
        if top != "det_lightning":
            return None
        if importlib.util.find_spec(f"determined.{rest}".rstrip(".")) is None:
            raise ModuleNotFoundError(f"determined has nothing like {fullname}.", name=fullname)
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = importlib.import_module(spec.name.replace("det_lightning", "determined", 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system replaced it by the spec of the alias.
        module.__spec__ = module.__spec__ and module.__spec__.loader_state


def load_trial(spec: str, directory: str) -> Any:
    """Import the trial's class from a module in ``directory``."""
    module_name, _, class_name = spec.rpartition(":")
    if not module_name:
        raise CannotRecord(f"The trial must be module:Class, such as model_def:MyTrial; got {spec!r}.")
    file = pathlib.Path(directory, module_name)
    if file.suffix == ".py":
        directory = str(file.parent)
        module_name = file.stem
    sys.path.insert(0, str(pathlib.Path(directory).resolve()))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        details = describe_error(error)
        reason = f"Module {module_name} in {directory} cannot be imported: {details['type']}: {details['message']}"
        raise CannotRecord(f"{reason}\n{details['traceback']}") from error
    found: Any = module
    for name in class_name.split("."):
        found = getattr(found, name, None)
    if inspect.isclass(found):
        return found
    base = importlib.import_module("determined.pytorch").PyTorchTrial
    classes = {name: item for name, item in vars(module).items() if inspect.isclass(item) and item is not base}
    trials = ", ".join(name for name, item in classes.items() if issubclass(item, base)) or "none"
    raise CannotRecord(f"Module {module_name} has no class {class_name}; the trials in it: {trials}.")


def needs_hparams(trial_class: Any) -> bool:
    """Return whether the constructor requires an argument ``hparams``, as in scripts for ``init()``."""
    parameter = inspect.signature(trial_class.__init__).parameters.get("hparams")
    return parameter is not None and parameter.default is parameter.empty


def choose_hparams(config: dict[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the constant hyperparameters of the configuration, overridden by ``given`` values."""
    missing: list[str] = []

    def constant(defined: dict[str, Any], given: dict[str, Any], prefix: str) -> dict[str, Any]:
        values = dict(given)
        for name, value in defined.items():
            if isinstance(value, dict) and "type" not in value:
                inner = given.get(name, {})
                values[name] = constant(value, inner, f"{prefix}{name}.") if isinstance(inner, dict) else inner
            elif name not in given and isinstance(value, dict) and value["type"] != "const":
                missing.append(prefix + name)
            elif name not in given:
                values[name] = value["val"] if isinstance(value, dict) else value
        return values

    values = constant((config or {}).get("hyperparameters") or {}, given, "")
    if missing:
        example = json.dumps(dict.fromkeys(missing, "..."))
        raise CannotRecord(f"The configuration has ranges for {', '.join(missing)}; choose: --hparams '{example}'.")
    return values


def _read_file(path: str) -> Any:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    if path.endswith(".json"):
        return json.loads(text)
    if importlib.util.find_spec("ruamel.yaml") is None:
        return importlib.import_module("yaml").safe_load(text)
    yaml: Any = importlib.import_module("ruamel.yaml")  # determined's own: 1e-3 is a number to it
    return yaml.YAML(typ="safe", pure=True).load(text)


def read_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the run, from the options of the command line."""
    if arguments.settings:
        return dict(_read_file(arguments.settings))
    config = _read_file(arguments.config) if arguments.config else None
    aggregation = ((config or {}).get("optimizations") or {}).get("aggregation_frequency", 1)
    return {
        "hparams": choose_hparams(config, json.loads(arguments.hparams)),
        "config": config,
        "arguments": json.loads(arguments.arguments),
        "batches": arguments.batches,
        "seed": arguments.seed,
        "validation_period": max(1, (arguments.batches + 1) // 2),
        "reporting_period": max(1, (arguments.batches + 3) // 4),
        "aggregation_frequency": aggregation,
    }


def record_to_file(arguments: argparse.Namespace) -> dict[str, Any]:
    """Record by the options of the command line, write the record, and return the record."""
    if importlib.util.find_spec("determined") is None:
        raise CannotRecord(
            f"determined is not installed for {sys.executable}; run the recorder where determined is installed."
        )
    settings = read_settings(arguments)
    sys.meta_path.insert(0, _DeterminedAsDetLightning())
    trial_class = load_trial(arguments.trial, arguments.directory)
    if needs_hparams(trial_class):
        settings["arguments"].setdefault("hparams", settings["hparams"])
    api = require_trainer()
    log = TrainingLog()
    training = functools.partial(train, record_trial(trial_class, api, log), api, settings, log)
    with tempfile.TemporaryDirectory() as storage:
        os.environ["XDG_DATA_HOME"] = storage  # where Determined puts the checkpoints of local runs
        record = make_record("determined", arguments.trial, settings, log, training)
    pathlib.Path(arguments.output).write_text(json.dumps(record, separators=(",", ":")), encoding="utf-8")
    return record


def require_trainer() -> Any:
    """Return ``determined.pytorch``, or raise CannotRecord if this release has no Trainer."""
    api = importlib.import_module("determined.pytorch")
    if not hasattr(api, "Trainer"):
        release = importlib.import_module("determined").__version__
        raise CannotRecord(f"determined {release} is too old for this; the recorder needs 0.21 or later.")
    # A record does not need the copy of the working directory, which may be large.
    util: Any = importlib.import_module("determined.util")
    util.write_user_code = lambda *args, **kwargs: None
    return api


def main() -> int:
    """Record by the options of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="recorder.py", description="Record a training of a trial on determined.")
    parser.add_argument("trial", help="module:Class, or path/to/file.py:Class")
    parser.add_argument("--config", help="experiment configuration, YAML or JSON")
    parser.add_argument(
        "--hparams", default="{}", help="hyperparameters as JSON, besides the hyperparameters of the configuration"
    )
    parser.add_argument("--arguments", default="{}", help="of the trial's constructor beyond the context, as JSON")
    parser.add_argument("--batches", type=int, default=20, help="how many to train (20)")
    parser.add_argument("--seed", type=int, default=0, help="of all random generators (0)")
    parser.add_argument("--settings", metavar="FILE", help="all of the above as one JSON file instead")
    parser.add_argument("--directory", default=".", help="where to import the module from (the working directory)")
    parser.add_argument("--output", required=True, help="the JSON file to write")
    arguments = parser.parse_args()
    try:
        record = record_to_file(arguments)
    except (CannotRecord, OSError, ValueError) as error:
        print(f"recorder.py: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {record['batches']} batches of {arguments.trial}.", file=sys.stderr)
    if record["error"]:
        print(f"The training ended with an error, which is recorded:\n{record['error']['traceback']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        # The order of a set of strings must be that of the process that is compared with this one.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    # Modules beside this file would hide modules of the trial that have the same names.
    with contextlib.suppress(ValueError):  # PYTHONSAFEPATH leaves it out
        sys.path.remove(str(pathlib.Path(__file__).resolve().parent))
    sys.exit(main())
