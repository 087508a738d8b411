"""The base class of trials for transformers models, and the functions that build their parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from det_lightning.errors import InvalidExperimentException
from det_lightning.escaping import get_logger
from det_lightning.missing_parts import how_to_install
from det_lightning.model_hub.huggingface._config_parser import (
    DatasetKwargs,
    LRSchedulerKwargs,
    OptimizerKwargs,
    as_arguments,
    default_parse_config_tokenizer_model_kwargs,
    default_parse_optimizer_lr_scheduler_kwargs,
    parse_dict_to_dataclasses,
)
from det_lightning.model_hub.utils import AttrDict, compute_num_training_steps
from det_lightning.pytorch._lr_scheduler import LRScheduler
from det_lightning.pytorch._pytorch_context import PyTorchTrialContext
from det_lightning.pytorch._pytorch_trial import PyTorchTrial

try:
    import transformers
    from transformers.optimization import Adafactor
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        f"model_hub.huggingface needs transformers: {how_to_install('transformers')}.", name="transformers"
    ) from error

logger = get_logger(__name__)

MODEL_MODES = {
    "base": transformers.AutoModel,
    "pretraining": transformers.AutoModelForPreTraining,
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "multiple-choice": transformers.AutoModelForMultipleChoice,
    "next-sentence": transformers.AutoModelForNextSentencePrediction,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
}

# Names of loaders in datasets, by file extension, if different.
_LOADERS = {"txt": "text", "jsonl": "json"}
# Collators of transformers rename these columns to arguments of models.
_LABELS = ("label", "label_ids")


def build_using_auto(
    config_kwargs: Any, tokenizer_kwargs: Any, model_mode: str, model_kwargs: Any, use_pretrained_weights: bool = True
) -> tuple[Any, Any, Any]:
    """Return a configuration, a tokenizer and a model, built by the ``Auto`` classes of transformers.

    Args:
        config_kwargs: arguments of ``AutoConfig.from_pretrained``, as a dict or :class:`ConfigKwargs`.
        tokenizer_kwargs: arguments of ``AutoTokenizer.from_pretrained``.
        model_mode: the task of the model: a key of ``MODEL_MODES``.
        model_kwargs: arguments of the model's ``from_pretrained``.
        use_pretrained_weights: whether to load pretrained weights; otherwise the weights are random.

    Raises:
        ValueError: there is no such ``model_mode``.
        OSError: configuration, tokenizer or weights cannot be found or loaded.
    """
    if model_mode not in MODEL_MODES:
        raise ValueError(f"model_mode must be one of {', '.join(MODEL_MODES)}; got {model_mode!r}.")
    config = transformers.AutoConfig.from_pretrained(**_with_token(config_kwargs))
    tokenizer = transformers.AutoTokenizer.from_pretrained(**_with_token(tokenizer_kwargs))
    builder = MODEL_MODES[model_mode]
    if use_pretrained_weights:
        model = builder.from_pretrained(**{**_with_token(model_kwargs), "config": config})
    else:
        model = builder.from_config(config)
    return config, tokenizer, model


def _with_token(given: Any) -> dict[str, Any]:
    """Return arguments with the token under its name in transformers 5."""
    arguments = as_arguments(given)
    token = arguments.pop("use_auth_token", None)
    return {**arguments, "token": token} if token else arguments


def group_parameters_for_optimizer(
    model: torch.nn.Module,
    weight_decay: float | None = 0,
    no_decay: tuple[str, ...] = ("bias", "LayerNorm.weight"),
) -> list[dict[str, Any]]:
    """Return the parameters of a model in two groups, with ``weight_decay`` and without.

    Parameters with a name that contains a string of ``no_decay`` belong to the second group.
    """
    decaying: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        group = others if any(part in name for part in no_decay) else decaying
        group.append(parameter)
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_default_optimizer(model: torch.nn.Module, optimizer_kwargs: OptimizerKwargs) -> torch.optim.Optimizer:
    """Return AdamW or Adafactor over the parameters of a model, equal to the optimizers of ``transformers.Trainer``."""
    groups = group_parameters_for_optimizer(model, optimizer_kwargs.weight_decay)
    if optimizer_kwargs.adafactor:
        adafactor: torch.optim.Optimizer = Adafactor(
            groups,
            lr=optimizer_kwargs.learning_rate,
            scale_parameter=optimizer_kwargs.scale_parameter,
            relative_step=optimizer_kwargs.relative_step,
        )
        return adafactor
    return torch.optim.AdamW(
        groups,
        lr=optimizer_kwargs.learning_rate,  # type: ignore[arg-type]
        betas=(optimizer_kwargs.adam_beta1, optimizer_kwargs.adam_beta2),  # type: ignore[arg-type]
        eps=optimizer_kwargs.adam_epsilon,  # type: ignore[arg-type]
    )


def build_default_lr_scheduler(optimizer: torch.optim.Optimizer, scheduler_kwargs: LRSchedulerKwargs) -> Any:
    """Return a scheduler of transformers for an optimizer."""
    return transformers.get_scheduler(
        scheduler_kwargs.lr_scheduler_type,
        optimizer,
        num_warmup_steps=scheduler_kwargs.num_warmup_steps,
        num_training_steps=scheduler_kwargs.num_training_steps,
    )


def default_load_dataset(data_config_input: Mapping[str, Any]) -> Any:
    """Return the dataset of a ``data`` section, with ``train`` and ``validation``.

    Args:
        data_config_input: the fields of :class:`DatasetKwargs`.

    Raises:
        ValueError: the section names no data, or no data to validate with.
        ModuleNotFoundError: datasets is not installed.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"default_load_dataset() needs datasets: {how_to_install('transformers')}.", name="datasets"
        ) from error
    (data,) = parse_dict_to_dataclasses((DatasetKwargs,), data_config_input)
    if data.dataset_name is None:
        return _load_files(datasets, data)
    loaded = datasets.load_dataset(data.dataset_name, data.dataset_config_name)
    if "validation" not in loaded:
        share = data.validation_split_percentage
        if share is None:
            raise ValueError(
                f"The dataset {data.dataset_name} has no validation data, but {', '.join(loaded)}. Set "
                "validation_split_percentage in the section data to validate on a part of the training data."
            )
        for name, part in (("validation", f"train[:{share}%]"), ("train", f"train[{share}%:]")):
            loaded[name] = datasets.load_dataset(data.dataset_name, data.dataset_config_name, split=part)
    return loaded


def _load_files(datasets: Any, data: DatasetKwargs) -> Any:
    named = {"train": data.train_file, "validation": data.validation_file}
    files = {name: file for name, file in named.items() if file is not None}
    if not files:
        raise ValueError("The section data names no data: set dataset_name, or train_file and validation_file.")
    extension = Path(next(iter(files.values()))).suffix[1:]
    return datasets.load_dataset(_LOADERS.get(extension, extension), data_files=files)


def remove_unused_columns(model: torch.nn.Module, dataset: Any) -> None:
    """Let a dataset show only labels and the columns in the signature of ``model.forward``; no data are removed.

    Args:
        model: the model, wrapped or not.
        dataset: a ``datasets.Dataset``; the function changes the format.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    taken = [*inspect.signature(model.forward).parameters, *_LABELS]
    columns = [name for name in taken if name in dataset.column_names]
    dataset.set_format(type=dataset.format["type"], columns=columns)


class BaseTransformerTrial(PyTorchTrial):
    """A trial with model, optimizer and scheduler built by hyperparameters, and a ``train_batch``.

    A subclass adds the two loaders and the evaluation, and may set ``hparams``, ``data_config`` and ``exp_config``
    before calling ``super().__init__``.

    Required hyperparameters: ``model_mode`` and ``use_apex_amp``; ``num_training_steps`` unless the configuration has
    the length in batches. ``use_pretrained_weights`` defaults to true. For further hyperparameters, see
    :class:`ConfigKwargs`, :class:`TokenizerKwargs`, :class:`ModelKwargs`, :class:`OptimizerKwargs` and
    :class:`LRSchedulerKwargs`.

    Attributes:
        hparams, data_config, exp_config: the hyperparameters and the configuration, as :class:`AttrDict`.
        config, tokenizer, model: objects of transformers; the model is wrapped.
        optimizer, lr_scheduler: wrapped; the scheduler steps after every batch.
        grad_clip_fn: clips gradients in place; None for no clipping.

    Raises:
        InvalidExperimentException: hyperparameters are missing; all are named.
        ValueError: see :func:`build_using_auto` and :func:`compute_num_training_steps`.
    """

    hparams: Any = None
    data_config: Any = None
    exp_config: Any = None

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = AttrDict(context.get_hparams() if self.hparams is None else self.hparams)
        if self.data_config is None:
            self.data_config = AttrDict(context.get_data_config())
        if self.exp_config is None:
            self.exp_config = AttrDict(context.get_experiment_config())
        self.check_hparams()
        parsed = default_parse_config_tokenizer_model_kwargs(self.hparams)
        self.config_kwargs, self.tokenizer_kwargs, self.model_kwargs = parsed
        optimizer_kwargs, scheduler_kwargs = default_parse_optimizer_lr_scheduler_kwargs(self.hparams)
        self.config, self.tokenizer, model = build_using_auto(
            self.config_kwargs,
            self.tokenizer_kwargs,
            self.hparams["model_mode"],
            self.model_kwargs,
            use_pretrained_weights=self.hparams["use_pretrained_weights"],
        )
        self.model: Any = context.wrap_model(model)
        self.optimizer: Any = context.wrap_optimizer(build_default_optimizer(self.model, optimizer_kwargs))
        if self.hparams["use_apex_amp"]:
            self.model, self.optimizer = context.configure_apex_amp(models=self.model, optimizers=self.optimizer)
        self.lr_scheduler = context.wrap_lr_scheduler(
            build_default_lr_scheduler(self.optimizer, scheduler_kwargs), LRScheduler.StepMode.STEP_EVERY_BATCH
        )
        norm = optimizer_kwargs.max_grad_norm
        self.grad_clip_fn = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=norm) if norm else None

    def check_hparams(self) -> None:
        """Add defaults of hyperparameters; raise an InvalidExperimentException or ValueError if others are missing."""
        missing = [name for name in ("model_mode", "use_apex_amp") if name not in self.hparams]
        if missing:
            raise InvalidExperimentException(
                f"{type(self).__name__} needs the hyperparameters {' and '.join(missing)}; got "
                f"{', '.join(self.hparams) or 'none'}."
            )
        if "num_training_steps" not in self.hparams:
            self.hparams["num_training_steps"] = compute_num_training_steps(
                self.context.get_experiment_config(), self.context.get_global_batch_size()
            )
        if "use_pretrained_weights" not in self.hparams:
            logger.warning(
                "The model starts from pretrained weights; use_pretrained_weights: false trains from scratch."
            )
            self.hparams["use_pretrained_weights"] = True

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train on a batch, a mapping of the model's arguments with labels; return the loss, of shape ``()``."""
        outputs = self.model(**batch)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, self.grad_clip_fn)
        return loss
