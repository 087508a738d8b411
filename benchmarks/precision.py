"""Time of a batch in mixed precision: a plain loop with torch.amp, the real Determined, and det_lightning.

    python benchmarks/precision.py [--rounds 5] [--batches 400] [--systems plain_amp,ours_O1]

On a GPU half precision is float16, with loss scaling; on the CPU it is bfloat16. Each measurement is a process of its
own; the systems take turns. What is timed is the time on the clock from one batch, after a warm-up, to the last, with
the GPU waited for at both ends; on the CPU it is the CPU time of the process. Needs ``determined==0.38.1`` beside
det_lightning for the system of that name. What needs a GPU is not run without one, and the report says so.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rounds import Stopwatch, measure_in_turn, processor_time

WARM_UP = 50
BATCH_SIZE, WIDTH = 64, 512
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HALF = torch.float16 if CUDA else torch.bfloat16
#: In Determined's own code mixed precision is for GPUs only: on the CPU it computes in float32.
GPU_ONLY = {"ours_16_mixed", "ours_wrap_scaler"}


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
        return time.perf_counter()
    return processor_time()


def build() -> tuple[torch.nn.Module, torch.utils.data.Dataset[Any]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 10),
    )
    inputs, labels = torch.randn(64 * BATCH_SIZE, 128), torch.randint(0, 10, (64 * BATCH_SIZE,))
    return model, torch.utils.data.TensorDataset(inputs, labels)


def run_plain(watch: Stopwatch, amp: bool) -> None:
    model, data = build()
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=CUDA or None)
    scaler = torch.amp.GradScaler("cuda", enabled=amp and CUDA)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    while True:
        for batch in loader:
            inputs, labels = (tensor.to(DEVICE) for tensor in batch)
            with torch.autocast(DEVICE.type, HALF) if amp else contextlib.nullcontext():
                outputs = model(inputs)
            scaler.scale(torch.nn.functional.cross_entropy(outputs.float(), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.tick()
            if watch.seen == watch.batches:
                return


def trial_class(pytorch: Any, watch: Stopwatch, level: str | None, amp: str | None) -> Any:
    model, data = build()

    class Trial(pytorch.PyTorchTrial):  # type: ignore[misc]
        def __init__(self, context: Any) -> None:
            self.context = context
            self.scaler = None
            if amp == "use_amp":
                context.experimental.use_amp()
            elif amp == "wrap_scaler":
                self.scaler = context.wrap_scaler(torch.amp.GradScaler("cuda"))
            wrapped = context.autocast_forward_pass(model) if amp == "wrap_scaler" else model
            self.model = context.wrap_model(wrapped)
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.001, fused=CUDA or None)
            self.optimizer = context.wrap_optimizer(optimizer)
            if level is not None:
                self.model, self.optimizer = context.configure_apex_amp(self.model, self.optimizer, opt_level=level)

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return pytorch.DataLoader(torch.utils.data.Subset(data, range(64)), batch_size=BATCH_SIZE)

        def loss(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.context.backward(loss if self.scaler is None else self.scaler.scale(loss))
            self.context.step_optimizer(self.optimizer, scaler=self.scaler)
            if self.scaler is not None:
                self.scaler.update()
            watch.tick()
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            return {"validation_loss": self.loss(batch)}

    return Trial


def run_trainer(watch: Stopwatch, pytorch: Any, level: str | None, amp: str | None, **flags: Any) -> None:
    with pytorch.init(enable_tensorboard_logging=False) as context:
        trainer = pytorch.Trainer(trial_class(pytorch, watch, level, amp)(context), context, **flags)
        trainer.fit(max_length=pytorch.Batch(watch.batches), checkpoint_policy="none")


def run_determined(watch: Stopwatch, amp: str | None) -> None:
    from determined import pytorch

    run_trainer(watch, pytorch, None, amp)


def run_ours(watch: Stopwatch, level: str | None = None, amp: str | None = None, **flags: Any) -> None:
    from det_lightning import pytorch

    run_trainer(watch, pytorch, level, amp, enable_progress_bar=False, **flags)


RUNNERS: dict[str, Callable[[Stopwatch], None]] = {
    "plain_float32": lambda watch: run_plain(watch, amp=False),
    "plain_amp": lambda watch: run_plain(watch, amp=True),
    "determined_use_amp": lambda watch: run_determined(watch, "use_amp"),
    "ours_use_amp": lambda watch: run_ours(watch, amp="use_amp"),
    "ours_wrap_scaler": lambda watch: run_ours(watch, amp="wrap_scaler"),
    "ours_O0": lambda watch: run_ours(watch, "O0"),
    "ours_O1": lambda watch: run_ours(watch, "O1"),
    "ours_O2": lambda watch: run_ours(watch, "O2"),
    "ours_O3": lambda watch: run_ours(watch, "O3"),
    "ours_bf16_mixed": lambda watch: run_ours(watch, precision="bf16-mixed"),
    "ours_16_mixed": lambda watch: run_ours(watch, precision="16-mixed"),
}
#: What each system is divided by: where the same is computed. On the CPU ``use_amp`` is float32.
PEERS = {
    "plain_amp": ["ours_O1", "ours_O2", "ours_O3", "ours_bf16_mixed", "ours_16_mixed", "ours_wrap_scaler"],
    "plain_float32": ["ours_O0"],
    "determined_use_amp": ["ours_use_amp"],
}
PEERS["plain_amp" if CUDA else "plain_float32"].append("ours_use_amp")


def main() -> None:
    left_out = [] if CUDA else sorted(GPU_ONLY)
    measured = measure_in_turn(
        RUNNERS, lambda batches: Stopwatch(batches, WARM_UP, now), __doc__, batches=400, left_out=left_out
    )
    report({system: [per_batch_us for per_batch_us, _ in figures] for system, figures in measured.items()}, left_out)


def report(times: dict[str, list[float]], left_out: list[str]) -> None:
    print(f"{'microseconds a batch on the ' + DEVICE.type:34} {'median':>9} {'min':>9} {'max':>9}")
    for system, own in times.items():
        print(f"{system:34} {statistics.median(own):9.1f} {min(own):9.1f} {max(own):9.1f}")
    print(f"\n{'ratio of the same round, median':34}")
    for peer, systems in PEERS.items():
        for system in systems:
            if system in times and peer in times:
                ratios = [mine / theirs for mine, theirs in zip(times[system], times[peer], strict=True)]
                print(f"{system + ' / ' + peer:40} {statistics.median(ratios):6.3f}")
    if left_out:
        print(f"\nNOT RUN, for there is no CUDA device: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
