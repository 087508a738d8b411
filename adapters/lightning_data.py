"""Undocumented uses of Lightning for the data of a call, with a contract test for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from det_lightning.adapters.lightning_package import TrainerFn, pl


def take_given_data(trainer: pl.Trainer) -> dict[str, Callable[[], Any]]:
    """Let Lightning ask the module for all data of ``fit`` or ``validate``; return functions for the data of the call.

    The key of a function is the name of the replaced method of the module.
    """
    fits = trainer.state.fn is TrainerFn.FITTING
    loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop] if fits else [trainer.validate_loop]
    given: dict[str, Callable[[], Any]] = {}
    for loop in loops:
        source = _get_data_source(loop)
        if source.instance is trainer.lightning_module:
            continue
        if not source.is_defined() or source.instance == []:
            given[source.name] = tuple  # Lightning validates on nothing then
            continue
        given[source.name] = copy.copy(source).dataloader
        source.instance = trainer.lightning_module
    return given


def find_datamodule(trainer: Any) -> pl.LightningDataModule | None:
    """Return the data module of a call, or None."""
    datamodule: pl.LightningDataModule | None = trainer.datamodule
    # A trainer remembers earlier data modules; Lightning attaches the data module of this call to all loops.
    return datamodule if _get_data_source(trainer.predict_loop).instance is datamodule else None


def has_data(trainer: pl.Trainer) -> bool:
    """Return whether there is data for ``test`` or ``predict``, from the call or from the module."""
    loop = trainer.test_loop if trainer.state.fn is TrainerFn.TESTING else trainer.predict_loop
    return bool(_get_data_source(loop).is_defined())


def _get_data_source(loop: Any) -> Any:
    return loop._data_source
