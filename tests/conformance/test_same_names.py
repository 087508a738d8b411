"""The public names of Determined 0.38.1 are here too, and do the same; those that are left out are listed."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import types
from typing import Any

import pytest

from det_lightning import pytorch
from tests.conformance.sides import SIDES, outcome

#: What talks to a master or to storages for one, starts processes in its containers, or belongs to its training loop.
LEFT_OUT = {
    "": "EnvContext LegacyTrial TrialController",
    "core": """
        DummyCheckpointContext DummyExperimentalCoreContext DummyPreemptContext DummyProfilerContext
        DummySearcherContext DummySearcherOperation DummyTrainContext SearcherContextMissing
    """,
    "errors": """
        CheckpointStateException EnterpriseOnlyError MultipleDownloadsFailed NoDirectStorageAccess ProxiedDownloadFailed
        SkipWorkloadException StopLoadingImplementation WorkerError WorkerFinishedGracefully
    """,
    "experimental": """
        Checkpoint Determined Experiment ExperimentReference Model ModelOrderBy ModelSortBy ModelVersion OrderBy Project
        Trial TrialOrderBy TrialReference TrialSortBy
    """,
    "horovod": "create_hostlist_arg create_performance_args create_run_command",
    "pytorch": "",
    "pytorch.samplers": "",
    "tensorboard.metric_writers.pytorch": "",
    "util": """
        calculate_batch_sizes check_sshd force_create_symlink forward_signals get_member_func humanize_float
        is_numerical_scalar json_encode legacy_trial_entrypoint_to_script make_metrics make_timing_log
        mask_checkpoint_storage mask_config_dict match_legacy_trial_class rmtree_nfs_safe signal_process_tree
        validate_batch_metrics write_user_code
    """,
}


def module_of(side: str, path: str) -> Any:
    return importlib.import_module(f"{side}.{path}" if path else side)


@pytest.mark.parametrize("path", LEFT_OUT)
def test_every_public_name_is_here_or_left_out(path: str) -> None:
    theirs, ours = (module_of(side, path) for side in SIDES)
    public = {
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (getattr(value, "__module__", None) or "determined").startswith("determined")
    }
    # Others may come to be here: `experimental` says of its names what to use.
    assert {name for name in public if not hasattr(ours, name)} <= set(LEFT_OUT[path].split())


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {
        "debug": True,
        "scheduling_unit": "7",
        "resources": {"native_parallel": 1, "slots_per_trial": "2"},
        "optimizations": {"average_training_metrics": False},
        "reproducibility": {"experiment_seed": 3},
        "profiling": {"enabled": True, "begin_on_batch": 5, "sync_timings": False},
        "records_per_epoch": "100",
        "min_validation_period": {"batches": 3},
        "min_checkpoint_period": {"epochs": 1},
        "searcher": {"metric": "loss"},
        "checkpoint_storage": {"type": "shared_fs"},
        "entrypoint": "model_def:Trial",
    },
    {"profiling": {"enabled": True, "begin_on_batch": 0, "end_after_batch": 9}, "entrypoint": ["python3", "train.py"]},
    {"profiling": {"enabled": True}, "searcher": {"metric": 1}, "entrypoint": ["python3", 1]},
    {"entrypoint": 5, "min_validation_period": 100, "min_checkpoint_period": None},
]


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_lookups_in_a_configuration_find_the_same(config: dict[str, Any]) -> None:
    theirs, ours = (module_of(side, "").ExperimentConfig(config) for side in SIDES)
    lookups = [name for name in vars(type(theirs)) if not name.startswith("_")]
    assert len(lookups) == 16
    found = {name: outcome(getattr(ours, name)) for name in lookups}
    assert found == {name: outcome(getattr(theirs, name)) for name in lookups}
    assert ours == config


@pytest.mark.parametrize(
    "environment", [{}, {"USE_HOROVOD": "1"}, {"USE_DEEPSPEED": "0"}, {"USE_TORCH_DISTRIBUTED": ""}]
)
def test_the_environment_names_the_same_launcher(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USE_HOROVOD", "USE_DEEPSPEED", "USE_TORCH_DISTRIBUTED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    theirs, ours = (module_of(side, "")._DistributedBackend for side in SIDES)
    for name in ("HOROVOD", "DEEPSPEED", "TORCH"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("use_horovod", "use_deepspeed", "use_torch"):
        assert getattr(ours(), name)() == getattr(theirs(), name)()


@pytest.mark.parametrize("name", ["data_length", "_simple_reduce_metrics"])
def test_functions_take_the_same_arguments(name: str) -> None:
    theirs, ours = (getattr(module_of(side, "pytorch"), name) for side in SIDES)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


class Parent:
    def method(self, one: Any, two: Any = None, *, three: Any = None) -> None:
        """Do nothing."""


class Child(Parent):
    def method(self, one: Any, two: Any = None, *, three: Any = None) -> None:
        """Do nothing, too."""


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("merge_dicts", ({"a": 1, "b": {"c": 2, "d": [3]}}, {"b": {"c": 4, "e": {"f": 5}}, "g": {}})),
        ("merge_dicts", ({"a": {"b": 1}}, {"a": 2})),
        ("merge_dicts", ({}, {"a": {"b": 1}})),
        ("has_param", (Child.method, "two")),
        ("has_param", (Child.method, "three")),
        ("has_param", (Child.method, "other", 2)),
        ("has_param", (Child.method, "other", 3)),
        ("is_overridden", (Child().method, Parent)),
        ("is_overridden", (Parent().method, Parent)),
        ("is_overridden", ("no method", Parent)),
        ("filter_duplicates", ([3, 1, 3, 2, 3, 1],)),
        ("filter_duplicates", ([],)),
        ("filter_duplicates", (["a", "B", "b"], lambda values: sorted(values, key=str.lower))),
    ],
)
def test_functions_for_scripts_return_the_same(function: str, arguments: tuple[Any, ...]) -> None:
    theirs, ours = (getattr(module_of(side, "util"), function)(*arguments) for side in SIDES)
    assert ours == theirs
    assert type(ours) is type(theirs)


def test_boundaries_have_the_same_types() -> None:
    theirs, ours = (module_of(side, "pytorch")._TrainBoundaryType for side in SIDES)
    assert [(member.name, member.value) for member in ours] == [(member.name, member.value) for member in theirs]


@pytest.mark.parametrize("side", SIDES)
def test_a_wrapped_function_is_a_simple_reducer(side: str) -> None:
    api = module_of(side, "pytorch")
    with api.init(enable_tensorboard_logging=False) as context:
        reducer = context.wrap_reducer(sum, name="total")
    assert isinstance(reducer, api._SimpleReducer)
    reducer.update(1)
    assert reducer.per_slot_reduce() == [1]
    assert reducer.cross_slot_reduce([[1, 2, 3], [10, 20]]) == 36
    assert api._SimpleReducer(list).cross_slot_reduce([[1, 2, 3], [10, 20]]) == [1, 10, 2, 20, 3]


def test_trial_context_is_the_general_one_too() -> None:
    # In older releases it was one, which is why trials are annotated with it.
    theirs, ours = (module_of(side, "").TrialContext for side in SIDES)
    assert ours is pytorch.PyTorchTrialContext
    methods = [name for name in vars(theirs) if not name.startswith("_")]
    assert len(methods) == 12
    assert [name for name in methods if not hasattr(ours, name)] == []


CLUSTER = [
    *("container_addrs", "container_rank", "container_slot_counts", "gpu_uuids", "latest_checkpoint"),
    *("user_data", "trial.hparams"),
]


@pytest.mark.parametrize("task_type", ["TRIAL", "NOTEBOOK", "COMMAND"])
def test_task_information_is_the_same(task_type: str) -> None:
    found = []
    for det in (module_of(side, "") for side in SIDES):
        info = det.ClusterInfo(
            *("http://master:8080", "cluster", "agent", [0, 1], "task", "allocation", "token", task_type),
            latest_checkpoint="uuid",
            trial_info=det.TrialInfo(1, 2, 3, {"lr": 0.1}, {"data": {"a": 1}}, 0, 0, False, None),
            rendezvous_info=det.RendezvousInfo(["10.0.0.1", "10.0.0.2"], 1, [2, 2]),
            resources_info=det.ResourcesInfo(["GPU-1", "GPU-2"]),
        )
        values = {name: outcome(functools.partial(operator.attrgetter(name), info)) for name in CLUSTER}
        found.append({**values, "property": isinstance(det.ResourcesInfo.gpu_uuids, property)})
    assert found[0] == found[1]
