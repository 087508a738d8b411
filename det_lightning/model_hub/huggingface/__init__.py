"""Trials for models from the transformers library."""

from det_lightning.model_hub.huggingface._config_parser import (
    ConfigKwargs,
    DatasetKwargs,
    LRSchedulerKwargs,
    ModelKwargs,
    OptimizerKwargs,
    TokenizerKwargs,
    default_parse_config_tokenizer_model_kwargs,
    default_parse_optimizer_lr_scheduler_kwargs,
    parse_dict_to_dataclasses,
)
from det_lightning.model_hub.huggingface._trial import (
    BaseTransformerTrial,
    build_default_lr_scheduler,
    build_default_optimizer,
    build_using_auto,
    default_load_dataset,
    remove_unused_columns,
)

__all__ = [
    "BaseTransformerTrial",
    "ConfigKwargs",
    "DatasetKwargs",
    "LRSchedulerKwargs",
    "ModelKwargs",
    "OptimizerKwargs",
    "TokenizerKwargs",
    "build_default_lr_scheduler",
    "build_default_optimizer",
    "build_using_auto",
    "default_load_dataset",
    "default_parse_config_tokenizer_model_kwargs",
    "default_parse_optimizer_lr_scheduler_kwargs",
    "parse_dict_to_dataclasses",
    "remove_unused_columns",
]
