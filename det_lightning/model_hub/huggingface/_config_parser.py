"""Dataclasses that turn hyperparameters and the ``data`` section into arguments of transformers and datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from det_lightning.model_hub.utils import AttrDict


class FlexibleDataclass:
    """Base of dataclasses that accept any arguments, and ignore arguments without a field.

    A field without a default is an attribute only if given; otherwise the default of the library holds.
    """

    def __init__(self, **given: Any) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.name in given:
                setattr(self, field.name, given[field.name])
            elif field.default is not dataclasses.MISSING:
                setattr(self, field.name, field.default)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {name: vars(self)[name] for name in names if name in vars(self)}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.as_dict().items())
        return f"{type(self).__qualname__}({values})"


@dataclasses.dataclass(init=False, repr=False)
class DatasetKwargs(FlexibleDataclass):
    """The data: a dataset of the hub, a directory with a dataset, or files.

    Attributes:
        dataset_name: the name of a dataset, or a directory.
        dataset_config_name: the configuration of the dataset.
        validation_split_percentage: the part of the training data to validate with, if there are no validation data.
        train_file: data to train on, if ``dataset_name`` is None.
        validation_file: data to validate with, if ``dataset_name`` is None.
    """

    dataset_name: str | None = None
    dataset_config_name: str | None = None
    validation_split_percentage: float | None = None
    train_file: str | None = None
    validation_file: str | None = None


@dataclasses.dataclass(init=False, repr=False)
class ModelKwargs(FlexibleDataclass):
    """The source of the weights of a model.

    Attributes:
        pretrained_model_name_or_path: a model of the hub, or a directory.
        cache_dir: the directory of downloads; None is the default of transformers.
        revision: a branch, a tag or a commit of the hub.
        use_auth_token: a token, or whether to use the token of ``hf auth login``.
    """

    pretrained_model_name_or_path: str | None = None
    cache_dir: str | None = None
    revision: str | None = "main"
    use_auth_token: bool | str | None = False


@dataclasses.dataclass(init=False, repr=False)
class ConfigKwargs(ModelKwargs):
    """The source of the configuration of a model.

    Attributes:
        num_labels: outputs of the last layer.
        finetuning_task: a note in the configuration.
    """

    num_labels: int | None = dataclasses.field(kw_only=True)
    finetuning_task: str | None = dataclasses.field(kw_only=True)


@dataclasses.dataclass(init=False, repr=False)
class TokenizerKwargs(ModelKwargs):
    """The source of the tokenizer.

    Attributes:
        use_fast: whether to use the tokenizer written in Rust.
        do_lower_case: whether the tokenizer ignores case.
    """

    use_fast: bool | None = True
    do_lower_case: bool | None = dataclasses.field(kw_only=True)


@dataclasses.dataclass
class OptimizerKwargs:
    """The optimizer, with the defaults of ``transformers.TrainingArguments``.

    Attributes:
        weight_decay: of all parameters but biases and weights of layer norms.
        adafactor: whether to use Adafactor instead of AdamW.
        learning_rate: the rate at the end of the warm-up.
        max_grad_norm: the largest norm of gradients; 0 does not clip.
        adam_beta1, adam_beta2, adam_epsilon: of AdamW.
        scale_parameter, relative_step: of Adafactor.
    """

    weight_decay: float | None = 0
    adafactor: bool | None = False
    learning_rate: float | None = 5e-5
    max_grad_norm: float | None = 1.0
    adam_beta1: float | None = 0.9
    adam_beta2: float | None = 0.999
    adam_epsilon: float | None = 1e-8
    scale_parameter: bool | None = False
    relative_step: bool | None = False


@dataclasses.dataclass
class LRSchedulerKwargs:
    """The learning rate over the course of the training.

    Attributes:
        num_training_steps: number of batches to train.
        lr_scheduler_type: a name for ``transformers.get_scheduler``.
        num_warmup_steps: number of batches while the rate rises from 0.
    """

    num_training_steps: int
    lr_scheduler_type: str | None = "linear"
    num_warmup_steps: int | None = 0


def parse_dict_to_dataclasses(
    dataclass_types: tuple[Any, ...], args: Mapping[str, Any], as_dict: bool = False
) -> tuple[Any, ...]:
    """Return an object of each dataclass, with fields filled from one mapping; several dataclasses may use a key.

    Args:
        dataclass_types: the dataclasses.
        args: values by the names of fields; other keys are ignored.
        as_dict: return each object as an :class:`AttrDict`.
    """
    parsed = []
    for wanted in dataclass_types:
        names = {field.name for field in dataclasses.fields(wanted) if field.init}
        instance = wanted(**{name: value for name, value in args.items() if name in names})
        parsed.append(AttrDict(as_arguments(instance)) if as_dict else instance)
    return tuple(parsed)


def as_arguments(given: Any) -> dict[str, Any]:
    """Return a dataclass or a mapping as a new dict."""
    if isinstance(given, FlexibleDataclass):
        return given.as_dict()
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.asdict(given)
    return dict(given)


def default_parse_config_tokenizer_model_kwargs(hparams: Mapping[str, Any]) -> tuple[AttrDict, AttrDict, AttrDict]:
    """Return the arguments for the configuration, the tokenizer and the model.

    Args:
        hparams: the fields of :class:`ConfigKwargs`, :class:`TokenizerKwargs` and :class:`ModelKwargs`.
            ``config_name``, ``tokenizer_name`` and ``model_name`` replace ``pretrained_model_name_or_path``.

    Raises:
        ValueError: a source is missing; the message names all missing sources.
    """
    parsed = parse_dict_to_dataclasses((ConfigKwargs, TokenizerKwargs, ModelKwargs), hparams, as_dict=True)
    config, tokenizer, model = parsed
    own_names = {"config_name": config, "tokenizer_name": tokenizer, "model_name": model}
    for own_name, arguments in own_names.items():
        if own_name in hparams:
            arguments.pretrained_model_name_or_path = hparams[own_name]
    missing = [name for name, arguments in own_names.items() if arguments.pretrained_model_name_or_path is None]
    if missing:
        raise ValueError(
            f"The hyperparameters have neither pretrained_model_name_or_path nor {', '.join(missing)}: set the name of "
            "a model of the hub, or a directory."
        )
    return config, tokenizer, model


def default_parse_optimizer_lr_scheduler_kwargs(
    hparams: Mapping[str, Any],
) -> tuple[OptimizerKwargs, LRSchedulerKwargs]:
    """Return the arguments for the optimizer and the scheduler; ``num_training_steps`` is needed."""
    optimizer, scheduler = parse_dict_to_dataclasses((OptimizerKwargs, LRSchedulerKwargs), hparams)
    return optimizer, scheduler
