"""A script of Determined's Hugging Face examples in small: a BERT of a few weights, on sequences that are made here."""

import importlib
import time
from typing import Any

import torch
import transformers


def make_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=16, max_position_embeddings=8, num_labels=2, **sizes)
    return transformers.BertForSequenceClassification(config)


def make_records(count: int, seed: int) -> list[dict[str, Any]]:
    """Return sequences of tokens, labelled by whether the first token is in the upper half of the vocabulary."""
    tokens = torch.randint(0, 16, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] >= 8)} for row in tokens]


class WaitForPreemption(transformers.TrainerCallback):
    """Waits at a step of a training that has not been resumed, until it is preempted."""

    def __init__(self, core_context: Any, step: int | None) -> None:
        self._core_context = core_context
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while state.global_step == self._step and not self._core_context.preempt.should_preempt(auto_ack=False):
            time.sleep(0.02)


def make_trainer(args: transformers.TrainingArguments, *callbacks: transformers.TrainerCallback) -> Any:
    return transformers.Trainer(
        model=make_model(),
        args=args,
        train_dataset=make_records(64, seed=1),
        eval_dataset=make_records(16, seed=2),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        callbacks=list(callbacks),
    )


def main() -> None:
    det: Any = importlib.import_module("determined")
    importlib.import_module("determined.transformers")
    info = det.get_cluster_info()
    hparams = info.trial.hparams
    args = transformers.TrainingArguments("output", report_to="none", use_cpu=True, **hparams["training_arguments"])
    distributed = det.core.DistributedContext.from_torch_distributed() if len(info.slot_ids) > 1 else None
    with det.core.init(distributed=distributed) as core_context:
        callback = det.transformers.DetCallback(core_context, args, user_data={"task": "first token"})
        waiting = WaitForPreemption(core_context, None if args.resume_from_checkpoint else hparams.get("waits_at"))
        trainer = make_trainer(args, waiting, callback)
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
