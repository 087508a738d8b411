"""Methods that a LightningModule needs and a trial does not have: hooks, and what configures the optimizers."""

from __future__ import annotations

import re

from det_lightning.porting.to_lightning.context_calls import TRAINED_BATCHES
from det_lightning.porting.to_lightning.holders import as_item
from det_lightning.porting.to_lightning.module_file import ModuleFile
from det_lightning.porting.to_lightning.trial import Scheduler, Trial

_COMPUTED = re.compile(r"[^\w.]")
_FIND_OPTIMIZER = [
    "def lightning_optimizer(self, optimizer):",
    "    held = self.optimizers()",
    "    return next(",
    "        found for found in (held if isinstance(held, list) else [held]) if found.optimizer is optimizer",
    "    )",
]
# Lightning creates an iterator per epoch; Determined created one, and drew once from torch's random state for it.
_ONE_DRAW = [
    "def on_train_epoch_end(self):",
    "    # The iterator of the next epoch draws from this, so that torch's random state stays as it is.",
    "    generator = torch.Generator().manual_seed(torch.initial_seed() + self.current_epoch)",
    "    self.trainer.train_dataloader.generator = generator",
]
_KEPT_GRADIENTS = ["def on_validation_model_zero_grad(self):", "    pass  # gradients outlive a validation"]
# The loader is the one batch of another loader, which draws nothing from torch's random state.
_FULL_DATASET = [
    [
        "def val_dataloader(self):",
        "    # One batch: the loader itself, which evaluate_full_dataset() goes over.",
        "    loader = self.build_validation_data_loader()",
        "    return torch.utils.data.DataLoader([loader], batch_size=None, generator=torch.Generator())",
    ],
    [
        "def validation_step(self, loader, batch_idx):",
        "    self.log_dict(self.evaluate_full_dataset(loader), batch_size=1, rank_zero_only=True)",
    ],
]


def append_hooks(trial: Trial, reducing: list[list[str]]) -> None:
    """Append properties and hooks to the class; ``reducing`` are those of reducers."""
    methods = [["@property", f"def {name}(self):", f"    return {text}"] for name, text in trial.properties.items()]
    methods += [*_full_dataset(trial, bool(reducing)), *reducing]
    if trial.models:
        # Lightning leaves modules as they are; Determined put wrapped models into training mode.
        methods.append(["def on_train_epoch_start(self):", *(f"    {line}" for line in _mode_lines(trial.models))])
    if next(trial.context_calls("disable_dataset_reproducibility_checks"), None) is None:
        methods.append(_ONE_DRAW)
    methods.append(_KEPT_GRADIENTS)
    steps = [line for scheduler in trial.schedulers for line in _scheduler_lines(trial.file, scheduler)]
    if steps:
        counted = [f"    batch_idx = {TRAINED_BATCHES}  # over all epochs"] if "batch_idx" in " ".join(steps) else []
        head = "def on_train_batch_end(self, outputs, batch, batch_idx):"
        methods.append([head, *counted, *(f"    {line}" for line in steps)])
    if trial.finds_optimizers:
        methods.append(_FIND_OPTIMIZER)
    returned = f"[{', '.join(map(as_item, trial.optimizers))}]"
    if trial.schedulers:
        returned += f", [{', '.join(as_item(scheduler.holder) for scheduler in trial.schedulers)}]"
    methods.append(["def configure_optimizers(self):", f"    return {returned}"])
    trial.file.append_to_class(trial.definition, methods)


def _full_dataset(trial: Trial, has_reducers: bool) -> list[list[str]]:
    method = trial.methods.get("evaluate_full_dataset")
    if method is None:
        return []
    if "self.device" not in trial.file.render(method):
        trial.file.todo(method, "move the batches of the loader to self.device here")
    if has_reducers:
        trial.file.todo(method, "update the reducers of on_validation_epoch_end() here")
    return _FULL_DATASET


def _mode_lines(holders: list[str]) -> list[str]:
    lines = []
    for holder in holders:
        if holder.startswith("*"):
            lines += [f"for model in self.{holder[1:]}:", "    model.train()"]
        else:
            lines.append(f"self.{holder}.train()")
    return lines


def _scheduler_lines(file: ModuleFile, scheduler: Scheduler) -> list[str]:
    held = f"self.{scheduler.holder.removeprefix('*')}"
    lines = [f"{held}.step()"]
    if scheduler.holder.startswith("*"):
        lines = [f"for scheduler in {held}:", "    scheduler.step()"]
    condition = _condition(scheduler.mode, scheduler.every)
    if condition is None:
        return [file.todo_line(f"call {held}.step() when its step mode says"), "pass"]
    if condition == "True":
        return lines
    return [] if condition == "False" else [f"if {condition}:", *(f"    {line}" for line in lines)]


def _condition(mode: str, every: str) -> str | None:
    """Return the condition, as code, for a scheduler to step; None if it is not known."""
    every = f"({every})" if _COMPUTED.search(every) else every
    if mode == "MANUAL_STEP":
        return "False"
    if mode == "STEP_EVERY_EPOCH":
        is_last = "self.trainer.is_last_batch"
        return is_last if every == "1" else f"{is_last} and (self.current_epoch + 1) % {every} == 0"
    if mode in ("STEP_EVERY_BATCH", "STEP_EVERY_OPTIMIZER_STEP"):
        return "True" if every == "1" else f"(batch_idx + 1) % {every} == 0"
    return None
