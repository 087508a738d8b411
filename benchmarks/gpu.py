"""Training speed on a GPU: plain torch, Lightning, Determined and det_lightning, for several models and precisions.

    python benchmarks/gpu.py [--batches 60] [--systems plain,ours] [--tasks MLP]
    python benchmarks/gpu.py --smoke                          # tiny models on a CPU: shows that it works

Prints a table of milliseconds per batch, with the ratio to plain torch. Each system is measured in a process of its
own. The table says why a system cannot train at a precision, and leaves out systems that are not installed. Data lie on
the device unless the task names the host or workers. "recording" is training with TensorBoard files, ten metrics, a
report and a validation every 20 batches beside a plain loop that only validates; "compiled" is
``torch.compile(mode="reduce-overhead")``, in CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import TASKS, Task, as_it_is, loss_of
from rounds import Stopwatch

#: Batches that are not timed: libraries load, and kernels are chosen.
WARM_UP = 10
#: Batches between two reports, and between two validations, where these are measured.
PERIOD = 20
LEARNING_RATE = 0.01
NO_APEX = "needs NVIDIA apex, which is not installed"


class Unavailable(Exception):
    """A system cannot train at a precision; the message says why."""


def now(device: torch.device) -> float:
    """Return the time when the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Case:
    """One measurement: a model, a precision, and the device."""

    def __init__(self, task: Task, precision: str, batches: int, smoke: bool) -> None:
        self.task = task
        self.precision = precision
        self.device = torch.device("cpu" if smoke or not torch.cuda.is_available() else "cuda:0")
        batches *= 1 if smoke else task.repeat
        self.clock = Stopwatch(batches, min(WARM_UP, batches // 2), functools.partial(now, self.device))
        torch.manual_seed(0)
        self.batch_size = task.size(smoke)
        self.model = task.make_model(smoke)
        at = self.device if task.workers is None else torch.device("cpu")
        self.data = task.make_data(self.batch_size * 16, at)

    def loader(self, kind: Any = torch.utils.data.DataLoader) -> Any:
        workers = self.task.workers or 0
        pinned = {"pin_memory": True, "persistent_workers": True} if workers and self.device.type == "cuda" else {}
        return kind(self.data, batch_size=self.batch_size, collate_fn=as_it_is, num_workers=workers, **pinned)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def compiled(self, model: torch.nn.Module) -> Any:
        """Return the model, compiled if that is measured; on a CPU, where kernels need a compiler, only traced."""
        if self.precision != "compiled":
            return model
        options = {"mode": "reduce-overhead"} if self.device.type == "cuda" else {"backend": "eager"}
        return torch.compile(model, **options)


def run_plain(case: Case) -> None:
    if case.precision in ("O1", "O2"):
        raise Unavailable(NO_APEX)
    model = case.compiled(case.model.to(case.device))
    optimizer = case.optimizer(case.model)
    enabled = case.precision == "amp"
    scaler = torch.amp.GradScaler(case.device.type, enabled=enabled)
    loader = case.loader()

    def loss(batch: Any) -> torch.Tensor:
        inputs, targets = (tensor.to(case.device, non_blocking=True) for tensor in batch)
        with torch.autocast(case.device.type, torch.float16, enabled=enabled):
            return loss_of(model(inputs), targets)

    for seen, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), start=1):
        scaler.scale(loss(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        case.clock.tick()
        if case.clock.seen == case.clock.batches:
            return
        if case.task.records and seen % PERIOD == 0:
            model.eval()
            with torch.no_grad():
                torch.stack([loss(validation_batch) for validation_batch in loader]).mean().item()
            model.train()


def run_lightning(case: Case) -> None:
    import pytorch_lightning as pl

    if case.precision in ("O1", "O2"):
        raise Unavailable("Lightning 2 has no apex levels")
    if case.task.records:
        raise Unavailable("its loggers and validations differ")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model
            self.predict = case.compiled(case.model)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.predict(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            case.clock.tick()

        def configure_optimizers(self) -> Any:
            return case.optimizer(self.model)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    precision: Any = "16-mixed" if case.precision == "amp" else "32-true"
    if precision == "16-mixed" and case.device.type == "cpu":
        precision = "bf16-mixed"  # of float16 Lightning says that it is not supported there
    trainer = pl.Trainer(
        accelerator="gpu" if case.device.type == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_steps=case.clock.batches,
        max_epochs=-1,
        **dict.fromkeys(off, False),
    )
    trainer.fit(Module(), case.loader())


def run_trial(case: Case, pytorch: Any, **trainer_flags: Any) -> None:
    class Trial(pytorch.PyTorchTrial):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            self.context = context
            if case.precision == "amp":
                context.experimental.use_amp()
            self.model = context.wrap_model(case.model)
            self.optimizer = context.wrap_optimizer(case.optimizer(self.model))
            if case.precision in ("O1", "O2"):
                self.model, self.optimizer = context.configure_apex_amp(
                    self.model, self.optimizer, opt_level=case.precision
                )
            self.predict = case.compiled(self.model)

        def build_training_data_loader(self) -> Any:
            return case.loader(pytorch.DataLoader)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = loss_of(self.predict(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            case.clock.tick()
            return {f"loss_{number}": loss for number in range(10 if case.task.records else 1)}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"validation_loss": loss_of(self.predict(batch[0]), batch[1])}

    periods = ("reporting_period", "validation_period") if case.task.records else ()
    with pytorch.init(enable_tensorboard_logging=case.task.records) as context:
        trainer = pytorch.Trainer(Trial(context), context, **trainer_flags)
        trainer.fit(
            max_length=pytorch.Batch(case.clock.batches),
            checkpoint_policy="none",
            **{name: pytorch.Batch(PERIOD) for name in periods},
        )


def run_determined(case: Case) -> None:
    from determined import pytorch

    if case.precision in ("O1", "O2") and importlib.util.find_spec("apex") is None:
        raise Unavailable(NO_APEX)
    run_trial(case, pytorch)


def run_ours(case: Case) -> None:
    from det_lightning import pytorch

    run_trial(case, pytorch, enable_progress_bar=False)


RUNNERS: dict[str, Callable[[Case], None]] = {
    "plain": run_plain,
    "ours": run_ours,
    "determined": run_determined,
    "lightning": run_lightning,
}


def measure(system: str, tasks: list[str], batches: int, smoke: bool) -> dict[str, Any]:
    """Return milliseconds per batch, or why there are none, by model and precision."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1 if smoke else torch.get_num_threads())
    found: dict[str, Any] = {}
    for name, precision in rows(tasks):
        try:
            case = Case(TASKS[name], precision, batches, smoke)
            RUNNERS[system](case)
            found[f"{name} {precision}"] = case.clock.per_batch_us / 1000
        except ModuleNotFoundError as e:
            return {"missing": f"{e.name} is not installed"}
        except Unavailable as e:
            found[f"{name} {precision}"] = str(e)
        except Exception as e:  # the table says what a system raised
            found[f"{name} {precision}"] = f"{type(e).__name__}: {e}".partition("\n")[0][:100]
    return found


def rows(tasks: list[str]) -> list[tuple[str, str]]:
    return [(name, precision) for name in tasks for precision in TASKS[name].precisions]


def measure_in_process(system: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        code = Path(folder, "code")
        code.mkdir()
        command = [sys.executable, str(Path(__file__).resolve()), "--system", system, "--result", str(result)]
        command += ["--batches", str(options.batches), "--tasks", options.tasks, *(["--smoke"] * options.smoke)]
        # Checkpoints of Determined's API go below the data directory.
        done = subprocess.run(
            command, cwd=code, capture_output=True, text=True, env={**os.environ, "XDG_DATA_HOME": folder}
        )
        if done.returncode:
            return {"missing": done.stderr.strip().rpartition("\n")[2][:200]}
        return dict(json.loads(result.read_text()))


def report(measured: dict[str, dict[str, Any]], tasks: list[str]) -> str:
    """Return the table, and below it why figures are missing."""
    reasons: dict[str, int] = {}
    systems = [system for system, found in measured.items() if "missing" not in found]
    lines = [f"| ms per batch | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for name in (f"{task} {precision}" for task, precision in rows(tasks)):
        plain = measured.get("plain", {}).get(name)
        lines.append(f"| {name} | {' | '.join(cell(measured[one][name], plain, reasons) for one in systems)} |")
    lines += [f"[{number}] {reason}" for reason, number in reasons.items()]
    missing = {system: found["missing"] for system, found in measured.items() if "missing" in found}
    return "\n".join([*lines, *(f"{system} was not measured: {why}" for system, why in missing.items())])


def cell(value: Any, plain: Any, reasons: dict[str, int]) -> str:
    if isinstance(value, str):
        return f"[{reasons.setdefault(value, len(reasons) + 1)}]"
    ratio = f" ({value / plain:.2f})" if isinstance(plain, float) else ""
    return f"{value:.3g}{ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, help="number of batches of each measurement; by default 60")
    parser.add_argument("--systems", default=",".join(RUNNERS))
    parser.add_argument("--tasks", default=";".join(TASKS), help="names of tasks, with semicolons between them")
    parser.add_argument("--smoke", action="store_true", help="tiny models and few batches, on a CPU")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batches = options.batches or (4 if options.smoke else 60)
    tasks = options.tasks.split(";")
    if options.system:
        Path(options.result).write_text(json.dumps(measure(options.system, tasks, options.batches, options.smoke)))
        return
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke shows that the benchmark works without one")
    device = "CPU, tiny models: no measurement" if options.smoke else torch.cuda.get_device_name()
    measured: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(KeyboardInterrupt):  # out of time: what was measured is worth having
        for system in options.systems.split(","):
            measured[system] = measure_in_process(system, options)
    print(f"{device}, torch {torch.__version__}, {options.batches} batches")
    print(report(measured, tasks))


if __name__ == "__main__":
    main()
