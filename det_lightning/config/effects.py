"""Decides which fields of a configuration have an effect, under ``det-lightning run`` and in calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from det_lightning.config.document import KeyPath, path_text
from det_lightning.config.experiment import ExperimentConfig


class FieldRule(NamedTuple):
    """A row of the table; it also applies below the field, except to fields with a row of their own."""

    field: str  # dotted keys
    effect: str  # used, ignored, warned (ignored, with a warning about a possible lack) or refused
    note: str  # the effect of the field, or why there is none
    in_calls: str | None  # in a configuration passed to init, TrialModule or pytest --trial-config, if different


# Field, effect and note of each row.
_TABLE = """
name | used | Names the experiment's directory.
description | used | Kept with the experiment.
labels | used | Kept with the experiment.
workspace | ignored | There are no workspaces.
project | ignored | There are no projects.
entrypoint | used | `module:Class`, a command, or a list of its parts. Needed.
data | used | Passed to trials.
hyperparameters | used | Drawn by the searcher. A bare value is a constant, a mapping a group.
searcher.name | used | Needed. A call trains one trial.
searcher.name: adaptive_simple | used | Read as `adaptive_asha`.
searcher.name: adaptive | refused | Write `adaptive_asha` with `max_trials`.
searcher.name: sync_halving | refused | Write `async_halving` with `max_trials`.
searcher.name: pbt | refused | Population-based training was removed in 0.18.
searcher.name: custom | refused | Custom search methods were removed in 0.38.
searcher.metric | used | The validation metric to search by. Needed.
searcher.smaller_is_better | used | Which way the metric is compared.
searcher.source_trial_id | refused | The platform's trials are unknown; name a checkpoint instead.
searcher.source_checkpoint_uuid | used; ignored in calls | Every trial starts from this checkpoint; its id, path or URL.
searcher.max_length | used | How long a trial class trains; `max_time` where that is missing.
searcher.max_trials | used; ignored in calls | How many trials there are.
searcher.max_concurrent_trials | used; ignored in calls | How many run at once; 0 sets no limit.
searcher.max_time | used | The value of `time_metric` at which a trial is complete.
searcher.time_metric | used | `batches`, `epochs` or a metric that trials report.
searcher.divisor | used; ignored in calls | One of so many trials continues at each rung.
searcher.mode | used; ignored in calls | How early `adaptive_asha` stops trials.
searcher.max_rungs | used; ignored in calls | The most rungs of a bracket of `adaptive_asha`.
searcher.bracket_rungs | used; ignored in calls | The rungs of each bracket, in place of `mode` and `max_rungs`.
searcher.num_rungs | used; ignored in calls | How many rungs there are.
searcher.stop_once | ignored | A stopped trial never continues, as in 0.38.
max_restarts | used; ignored in calls | How often a trial that fails is started again.
scheduling_unit | used | Batches between two reports, and two checks for a stop.
records_per_epoch | ignored | An epoch is one pass over the data loader, as in 0.38; an EstimatorTrial needs the field.
min_validation_period | used | 0 is never. A script reads the field from its own configuration.
min_checkpoint_period | used | 0 is never. A script reads the field from its own configuration.
perform_initial_validation | used | Validate before the first batch.
checkpoint_policy | used | `best` is the best of the whole experiment.
checkpoint_storage | used | The location and credentials of the storage.
checkpoint_storage.type | used | Without a type, `checkpoints` in the experiment's directory.
checkpoint_storage.save_experiment_best | used | Kept when the experiment ends.
checkpoint_storage.save_trial_best | used | Kept when the experiment ends.
checkpoint_storage.save_trial_latest | used | Kept when the experiment ends.
checkpoint_storage.container_path | used | \
The location of the storage; a relative path begins at the experiment's directory.
checkpoint_storage.propagation | ignored | There are no containers.
checkpoint_storage.type: hdfs | refused | Copy the checkpoints to another storage.
optimizations.aggregation_frequency | used | Batches for one update.
optimizations.average_aggregated_gradients | used | Their mean in place of their sum.
optimizations.average_training_metrics | ignored | Training metrics are the chief's.
optimizations.gradient_compression | used | Half precision between processes, where Horovod trains.
optimizations.mixed_precision | warned; used in calls | \
Applied to trials with `build_model`; others call `context.configure_apex_amp` or use torch.amp.
optimizations.tensor_fusion_threshold | ignored | Set Horovod's own variables.
optimizations.tensor_fusion_cycle_time | ignored | Set Horovod's own variables.
optimizations.auto_tune_tensor_fusion | ignored | Set Horovod's own variables.
optimizations.grad_updates_size_file | ignored | Unused since 0.12.
reproducibility.experiment_seed | used | By default the time, which is recorded.
resources.slots_per_trial | used; ignored in calls | \
Processes of a trial, each with a GPU; 0 is one process without a GPU.
resources.max_slots | used; ignored in calls | Limits how many trials run at once.
resources | ignored | There is no cluster scheduler.
resources.shm_size | ignored | There are no containers.
resources.devices | ignored | There are no containers.
environment.environment_variables | used; ignored in calls | Set for the trials; a bare `NAME` is passed on.
environment | ignored | There are no containers.
bind_mounts | ignored | There are no containers. Warned where `container_path` is another path and missing.
profiling | warned | Determined's profiler needs its master; use `context.set_profiler()`.
debug | used; ignored in calls | Logs more.
log_policies | used; ignored in calls | \
Patterns of Go, searched for in a trial's log. `cancel_retries` applies; `exclude_node` does not.
retention_policy | ignored | Logs are files; nothing deletes them.
preemption_timeout | used; ignored in calls | Seconds from asking a trial to end to killing it.
slurm | ignored | There is no cluster scheduler.
pbs | ignored | There is no cluster scheduler.
integrations | ignored | There are no Pachyderm pipelines and no webhooks.
tensorboard_storage | ignored | Event files go beside the checkpoints.
security | ignored | Unused since 0.12.
data_layer | ignored | Unused since 0.18, except by the dataset caches of an EstimatorTrial.
internal | ignored | Of the platform itself.
"""


def _read_row(row: str) -> FieldRule:
    field, effects, note = (part.strip() for part in row.split("|"))
    effect, _, in_calls = effects.removesuffix(" in calls").partition("; ")
    return FieldRule(field, effect, note, in_calls or None)


FIELD_RULES = tuple(map(_read_row, _TABLE.strip().splitlines()))
_BY_FIELD = {rule.field: rule for rule in FIELD_RULES}


@dataclasses.dataclass(frozen=True)
class FieldEffect:
    """The effect of a given field."""

    line: int | None  # in the file; None for a field from elsewhere
    path: str  # the keys, such as resources.shm_size
    effect: str  # never "refused", because reading such a field fails
    note: str  # the effect of the field, or why there is none


def field_effects(config: ExperimentConfig) -> list[FieldEffect]:
    """Return the effect of each given field under ``det-lightning run``, in the order of the file."""
    effects = [_effect(config, path) for path in _find_given(config, ()) if path[0] != "bind_mounts"]
    for i, mount in enumerate(config.bind_mounts):
        path = ("bind_mounts", i)
        if mount.container_path == mount.host_path or Path(mount.container_path).exists():
            effects.append(_effect(config, path))
        else:
            note = f"{mount.container_path} does not exist here: link it to {mount.host_path}, or change the code"
            effects.append(FieldEffect(config.find_line(path), path_text(path), "warned", note))
    return sorted(effects, key=lambda effect: (effect.line or 0, effect.path))


def without_effect_in_calls(
    config: ExperimentConfig, *, idle: Collection[str] = (), read: Collection[str] = ()
) -> list[str]:
    """Return the names of given fields ignored by a call for one trial, unless a field has the default value.

    The call also ignores the sections ``idle``; the trial itself reads the fields ``read``.
    """
    paths = {path_text(path): path for path in _find_given(config, ())}
    return sorted(
        {
            *(name for name, path in paths.items() if name not in read and _is_idle(config, path)),
            *(str(path[0]) for path in paths.values() if path[0] in idle and not _has_default(config, path)),
        }
    )


def _is_idle(config: ExperimentConfig, path: KeyPath) -> bool:
    if path == ("searcher", "name"):
        return config.searcher.name != "single"
    rule = rule_for(path)
    return (rule.in_calls or rule.effect) in ("ignored", "warned") and not _has_default(config, path)


def _has_default(config: ExperimentConfig, path: KeyPath) -> bool:
    section: Any = config
    for key in path[:-1]:
        section = getattr(section, str(key))
    field = type(section).model_fields[str(path[-1])]
    value: Any = getattr(section, str(path[-1]))
    return bool(value == field.get_default(call_default_factory=True))


def rule_for(path: KeyPath) -> FieldRule:
    """Return the row of the table for a field, or raise a KeyError."""
    names = [key for key in path if isinstance(key, str)]
    for end in range(len(names), 0, -1):
        if (rule := _BY_FIELD.get(".".join(names[:end]))) is not None:
            return rule
    raise KeyError(path_text(path))


def _effect(config: ExperimentConfig, path: KeyPath) -> FieldEffect:
    rule = rule_for(path)
    effect = rule.effect
    is_idle_profiling = path[0] == "profiling" and not config.profiling.enabled
    if effect == "warned" and (_has_default(config, path) or is_idle_profiling):
        effect = "ignored"  # the experiment lacks nothing
    return FieldEffect(config.find_line(path), path_text(path), effect, rule.note)


def _find_given(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the path of each given field below ``path``, as deep as the table goes."""
    is_divided = not path or any(rule.field.startswith(f"{path_text(path)}.") for rule in FIELD_RULES)
    if is_divided and isinstance(value, BaseModel):
        for name in value.model_fields_set:
            yield from _find_given(getattr(value, name), (*path, name))
    else:
        yield path
