"""Training speed on a GPU: plain torch, Lightning, Determined and det_lightning, at four precisions, for two models.

    python benchmarks/gpu.py [--batches 60] [--plot gpu.svg] [--systems plain,ours]
    python benchmarks/gpu.py --smoke                          # tiny models on a CPU: shows that it works

Prints one table, of samples per second with the ratio to plain torch, and saves a plot of it. Each system is measured
in a process of its own; the data are made on the device, so that loading plays no part. Where a system cannot train at
a precision, the table says why. A system that is not installed is left out. Needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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

PRECISIONS = ("float32", "amp", "O1", "O2")
#: Batches that are not timed: libraries load, and kernels are chosen.
WARM_UP = 10
LEARNING_RATE = 0.01
NO_APEX = "needs NVIDIA apex, which is not installed"


class Unavailable(Exception):
    """A system cannot train at a precision; the message says why."""


class Clock:
    """Times the batches after the warm-up, until the device has finished them."""

    def __init__(self, batches: int, warm_up: int, device: torch.device) -> None:
        self.batches = batches
        self.per_batch_s = 0.0
        self._warm_up = warm_up
        self._device = device
        self._seen = 0
        self._started = 0.0

    def tick(self) -> bool:
        """Count one batch; return whether it was the last."""
        self._seen += 1
        if self._seen == self._warm_up:
            self._started = self._now()
        elif self._seen == self.batches:
            self.per_batch_s = (self._now() - self._started) / (self.batches - self._warm_up)
        return self._seen >= self.batches

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Case:
    """One measurement: a model, a precision, and the device."""

    def __init__(self, task: Task, precision: str, batches: int, smoke: bool) -> None:
        self.precision = precision
        self.device = torch.device("cpu" if smoke or not torch.cuda.is_available() else "cuda:0")
        self.clock = Clock(batches, min(WARM_UP, batches // 2), self.device)
        torch.manual_seed(0)
        self.batch_size = task.size(smoke)
        self.model = task.make_model(smoke)
        self.data = task.make_data(self.batch_size * 16, self.device)

    def loader(self, kind: Any = torch.utils.data.DataLoader) -> Any:
        return kind(self.data, batch_size=self.batch_size, collate_fn=as_it_is)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def run_plain(case: Case) -> None:
    if case.precision in ("O1", "O2"):
        raise Unavailable(NO_APEX)
    model = case.model.to(case.device)
    optimizer = case.optimizer(model)
    enabled = case.precision == "amp"
    scaler = torch.amp.GradScaler(case.device.type, enabled=enabled)
    while True:
        for inputs, targets in case.loader():
            with torch.autocast(case.device.type, torch.float16, enabled=enabled):
                loss = loss_of(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if case.clock.tick():
                return


def run_lightning(case: Case) -> None:
    import pytorch_lightning as pl

    if case.precision in ("O1", "O2"):
        raise Unavailable("Lightning 2 has no apex levels")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss_of(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *_: Any) -> None:
            case.clock.tick()

        def configure_optimizers(self) -> Any:
            return case.optimizer(self.model)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    precision: Any = {"float32": "32-true", "amp": "16-mixed"}[case.precision]
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

        def build_training_data_loader(self) -> Any:
            return case.loader(pytorch.DataLoader)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = loss_of(self.model(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            case.clock.tick()
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"validation_loss": loss_of(self.model(batch[0]), batch[1])}

    with pytorch.init(enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(Trial(context), context, **trainer_flags)
        trainer.fit(max_length=pytorch.Batch(case.clock.batches), checkpoint_policy="none")


def run_determined(case: Case) -> None:
    from determined import pytorch

    if case.precision in ("O1", "O2"):
        try:
            import apex  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            raise Unavailable(NO_APEX) from None
    run_trial(case, pytorch)


def run_ours(case: Case) -> None:
    from det_lightning import pytorch

    run_trial(case, pytorch, enable_progress_bar=False)


RUNNERS: dict[str, Callable[[Case], None]] = {
    "plain": run_plain,
    "lightning": run_lightning,
    "determined": run_determined,
    "ours": run_ours,
}


def measure(system: str, batches: int, smoke: bool) -> dict[str, Any]:
    """Return samples per second, or why there are none, by model and precision."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1 if smoke else torch.get_num_threads())
    found: dict[str, Any] = {}
    for name, task in TASKS.items():
        for precision in PRECISIONS:
            try:
                case = Case(task, precision, batches, smoke)
                RUNNERS[system](case)
                found[f"{name} {precision}"] = case.batch_size / case.clock.per_batch_s
            except ModuleNotFoundError as e:
                return {"missing": f"{e.name} is not installed"}
            except Unavailable as e:
                found[f"{name} {precision}"] = str(e)
            except Exception as e:  # the table says what a system raised
                found[f"{name} {precision}"] = f"{type(e).__name__}: {e}".partition("\n")[0][:100]
    return found


def measure_in_process(system: str, batches: int, smoke: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        code = Path(folder, "code")
        code.mkdir()
        command = [sys.executable, str(Path(__file__).resolve()), "--system", system, "--result", str(result)]
        command += ["--batches", str(batches), *(["--smoke"] if smoke else [])]
        # Checkpoints of Determined's API go below the data directory.
        done = subprocess.run(
            command, cwd=code, capture_output=True, text=True, env={**os.environ, "XDG_DATA_HOME": folder}
        )
        if done.returncode:
            return {"missing": done.stderr.strip().rpartition("\n")[2][:200]}
        return dict(json.loads(result.read_text()))


def report(measured: dict[str, dict[str, Any]]) -> str:
    """Return the table, and below it why figures are missing."""
    out = io.StringIO()
    reasons: dict[str, int] = {}
    systems = [system for system, found in measured.items() if "missing" not in found]
    with contextlib.redirect_stdout(out):
        print(f"| samples per second | {' | '.join(systems)} |")
        print("|---" * (len(systems) + 1) + "|")
        for name in (f"{task} {precision}" for task in TASKS for precision in PRECISIONS):
            plain = measured.get("plain", {}).get(name)
            print(f"| {name} | {' | '.join(cell(measured[one][name], plain, reasons) for one in systems)} |")
        for reason, number in reasons.items():
            print(f"[{number}] {reason}")
        for system, found in measured.items():
            if "missing" in found:
                print(f"{system} was not measured: {found['missing']}")
    return out.getvalue()


def cell(value: Any, plain: Any, reasons: dict[str, int]) -> str:
    if isinstance(value, str):
        return f"[{reasons.setdefault(value, len(reasons) + 1)}]"
    ratio = f" ({value / plain:.2f})" if isinstance(plain, float) else ""
    return f"{value:.0f}{ratio}"


def plot(measured: dict[str, dict[str, Any]], file: str, title: str) -> None:
    """Save bars of the samples per second, a chart for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems = [system for system, found in measured.items() if "missing" not in found]
    figure, charts = pyplot.subplots(1, len(TASKS), figsize=(11, 4), squeeze=False)
    for chart, (name, task) in zip(charts[0], TASKS.items(), strict=True):
        for index, system in enumerate(systems):
            values = [measured[system][f"{name} {precision}"] for precision in PRECISIONS]
            heights = [value if isinstance(value, float) else 0.0 for value in values]
            places = [place + index * 0.8 / len(systems) for place in range(len(PRECISIONS))]
            chart.bar(places, heights, 0.8 / len(systems), label=system)
        chart.set_xticks([place + 0.3 for place in range(len(PRECISIONS))], PRECISIONS)
        chart.set_title(name)
        chart.set_ylabel(f"{task.unit} per second")
    charts[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, help="number of batches of each measurement; by default 60")
    parser.add_argument("--systems", default=",".join(RUNNERS))
    parser.add_argument("--plot", default="gpu.svg", help="file of the plot")
    parser.add_argument("--smoke", action="store_true", help="tiny models and few batches, on a CPU")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches = options.batches or (4 if options.smoke else 60)
    if options.system:
        Path(options.result).write_text(json.dumps(measure(options.system, batches, options.smoke)))
        return
    if not options.smoke and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke shows that the benchmark works without one")
    device = "CPU, tiny models: no measurement" if options.smoke else torch.cuda.get_device_name()
    title = f"{device}, torch {torch.__version__}, {batches} batches"
    measured = {system: measure_in_process(system, batches, options.smoke) for system in options.systems.split(",")}
    print(title)
    print(report(measured), end="")
    try:
        plot(measured, options.plot, title)
        print(f"The plot is in {options.plot}.")
    except ModuleNotFoundError:
        print("There is no plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()
