"""The searcher and hyperparameters of a configuration, written as short as the tests of searches need."""

from __future__ import annotations

from typing import Any

from det_lightning.config.hyperparameters import Categorical, Const, Double, Int, Log
from det_lightning.config.searchers import SEARCHERS


def searcher(name: str, **fields: Any) -> Any:
    clock: dict[str, Any] = {"time_metric": "batches"} if "max_time" in fields else {}
    return SEARCHERS[name](metric="loss", **fields, **clock)


def constant(val: Any) -> Const:
    return Const(val=val)


def choice(*vals: Any) -> Categorical:
    return Categorical(vals=[*vals])


def integer(minval: int, maxval: int, count: int | None = None) -> Int:
    return Int(minval=minval, maxval=maxval, count=count)


def number(minval: float, maxval: float, count: int | None = None) -> Double:
    return Double(minval=minval, maxval=maxval, count=count)


def power(minval: float, maxval: float, base: float, count: int | None = None) -> Log:
    return Log(minval=minval, maxval=maxval, base=base, count=count)
