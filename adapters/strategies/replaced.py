"""Replacing Lightning's own strategies for several processes by the strategies for trials."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_info

from det_lightning import errors
from det_lightning.adapters import lightning_strategies
from det_lightning.adapters.lightning_package import pl
from det_lightning.adapters.strategies.ddp import PerModelDDPStrategy
from det_lightning.adapters.strategies.fsdp import PerModelFSDPStrategy
from det_lightning.adapters.strategies.per_model import PerModelStrategy

#: Strategies of Lightning with a counterpart for trials.
REPLACED_STRATEGIES = (pl.strategies.DDPStrategy, pl.strategies.FSDPStrategy)


def use_trial_strategy(trainer: pl.Trainer) -> None:
    """Replace a trainer's ``"ddp"`` or ``"fsdp"`` by the strategy for trials, with its options and a notice."""
    given = trainer.strategy
    if isinstance(given, PerModelStrategy) or not isinstance(given, REPLACED_STRATEGIES):
        return
    taken = find_counterpart(given)
    rank_zero_info(
        f"{type(given).__name__} is replaced by strategy={taken.strategy_name!r}, which wraps each of the trial's "
        "models by itself."
    )
    lightning_strategies.replace_strategy(trainer, taken)
    if isinstance(given, pl.strategies.FSDPStrategy):
        taken.precision_plugin = pl.plugins.Precision()


def find_counterpart(strategy: pl.strategies.DDPStrategy | pl.strategies.FSDPStrategy) -> PerModelStrategy:
    """Return the strategy for trials with the options of one of ``REPLACED_STRATEGIES``."""
    kind: type[PerModelStrategy] = PerModelDDPStrategy
    if isinstance(strategy, pl.strategies.FSDPStrategy):
        kind = PerModelFSDPStrategy
        options, others = lightning_strategies.read_fsdp_options(strategy)
    else:
        options, others = lightning_strategies.read_ddp_options(strategy)
    if not others:
        try:
            return kind(**options)
        except TypeError as e:
            others = [str(e)]
    raise errors.UnsupportedTrainerFlags(
        f"pl.Trainer cannot train a trial with these options of {type(strategy).__name__}: {'; '.join(others)}. Use "
        f"{kind.__name__} of det_lightning.adapters.strategies, with its own options."
    )
