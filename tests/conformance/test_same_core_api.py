"""The Core API has the methods and arguments of Determined's, and does the same without a cluster."""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from det_lightning.ranks.topology import free_port
from tests.conformance.sides import SIDES, outcome
from tests.ranks.ranks import in_threads, numbers

CLASSES = [
    *("CheckpointContext", "Context", "DistributedContext", "ExperimentalCoreContext", "PreemptContext"),
    *("ProfilerContext", "SearcherContext", "SearcherOperation", "TrainContext"),
]
ENUMS = ["DownloadMode", "EarlyExitReason", "PreemptMode", "SearcherMode", "TensorboardMode", "Unit"]


def core_of(side: str) -> Any:
    importlib.import_module(side)
    return importlib.import_module(f"{side}.core")


def shown(default: Any) -> Any:
    return default.value if isinstance(default, enum.Enum) else "a function" if callable(default) else default


def list_parameters(function: Any) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(function)
    return [(one.name, one.kind, shown(one.default)) for one in signature.parameters.values() if one.name != "_"]


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_take_the_same_arguments(name: str) -> None:
    theirs, ours = (getattr(core_of(side), name) for side in SIDES)
    public = {name: member for name, member in inspect.getmembers(theirs) if not name.startswith("_")}
    assert public.keys() <= set(dir(ours))
    for method, member in public.items():
        if not callable(member):
            continue
        expected, found = list_parameters(member), list_parameters(getattr(ours, method))
        # Ours may take more.
        assert found[: len(expected)] == expected or set(expected) <= set(found), method


def test_init_takes_the_same_arguments() -> None:
    theirs, ours = (list_parameters(core_of(side).init) for side in SIDES)
    assert ours == theirs


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations_have_the_same_members(name: str) -> None:
    theirs, ours = ({member.name: member.value for member in getattr(core_of(side), name)} for side in SIDES)
    assert ours == theirs


def tree(directory: Path) -> dict[str, Any]:
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: json.loads(path.read_text()) if name == "metadata.json" else (path.read_text(), path.stat().st_mode)
        for name, path in files.items()
    }


def complete(operation: Any) -> int:
    operation.report_progress(1)
    operation.report_completed(0.5)
    return int(operation.length)


def run_checkpoints(core: Any, folder: Path) -> list[Any]:
    own, linked = folder / "own", folder / "linked"
    for file in (own / "part" / "data", own / "model", linked / "of" / "script" / "run"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    (own / "part" / "empty").mkdir()
    (linked / "of" / "script" / "run").chmod(0o700)
    (linked / "to").symlink_to(linked / "of", target_is_directory=True)
    seen: list[Any] = []
    with core.init(checkpoint_storage=str(folder / "storage")) as context:
        checkpoint = context.checkpoint

        def look(storage_id: str) -> None:
            with checkpoint.restore_path(storage_id) as path:
                seen.append(tree(path))
            for number, mode in enumerate(core.DownloadMode):
                for selector in (None, lambda name: name.startswith("part"), lambda name: name == "part/empty/"):
                    target = folder / f"copy-{len(seen)}-{number}"
                    checkpoint.download(storage_id, target, mode, selector=selector)
                    seen.append(tree(target))
                    seen.append(sorted(str(path.relative_to(target)) for path in target.rglob("*")))

        look(checkpoint.upload(str(own), {"steps_completed": 1, "nested": {"a": [1, None]}}))
        look(checkpoint.upload(linked))
        look(checkpoint.upload(own, shard=True))
        look(checkpoint.upload(own, selector=lambda name: name != "part/data"))
        for shard in (False, True):
            with checkpoint.store_path({"steps_completed": 2}, shard=shard) as (path, storage_id):
                (path / "file").write_text("content")
                seen.append((path.name == storage_id, path.is_dir()))
            look(storage_id)
        checkpoint.delete(storage_id)
        checkpoint.delete(storage_id)
        seen += [
            outcome(lambda: checkpoint.download(storage_id, folder / "none")),
            outcome(lambda: checkpoint.upload(None)),
            outcome(lambda: checkpoint.upload(None, shard=True)),
            outcome(lambda: checkpoint.upload(folder / "is not there")),
            outcome(lambda: checkpoint.upload(own, {"object": object()})),
        ]
    return seen


def run_the_rest(core: Any, folder: Path) -> list[Any]:
    with warnings.catch_warnings(), core.init(checkpoint_storage=str(folder)) as context:
        warnings.simplefilter("ignore")
        train, preempt, searcher = context.train, context.preempt, context.searcher
        return [
            context.info,
            context.distributed.size,
            train.report_training_metrics(1, {"loss": 1.0}, batch_metrics=[{"loss": 1.0}]),
            train.report_validation_metrics(steps_completed=1, metrics={"loss": 1.0, "none": None}),
            # Scripts divide numbers of samples by batch sizes.
            train.report_training_metrics(10 / 4, {"loss": 1.0}, batch_metrics=[{"loss": 1.0}]),
            train.report_validation_metrics(8 / 4, {"loss": 1.0}),
            train.report_metrics("group.name", 1, {"loss": 1.0}),
            outcome(lambda: train.report_progress(2.0)),
            train.set_status("busy"),
            train.get_experiment_best_validation(),
            train.upload_tensorboard_files(),
            train.report_early_exit(core.EarlyExitReason.USER_REQUESTED_STOP),
            preempt.should_preempt(),
            preempt.should_preempt(auto_ack=False),
            preempt.acknowledge_preemption_signal(),
            outcome(preempt.start),
            [complete(operation) for operation in searcher.operations()],
            [complete(operation) for operation in searcher.operations(core.SearcherMode.ChiefOnly)],
            outcome(lambda: list(searcher.operations())),
            outcome(lambda: [complete(op) or complete(op) for op in searcher.operations()]),
            searcher.get_configured_units().name,
            searcher.acknowledge_out_of_ops(),
            context.profiler.on(),
            context.profiler.off(),
            context.profiler.on(sampling_interval=0, samples_per_report=0),
        ]


@pytest.mark.parametrize("run", [run_checkpoints, run_the_rest])
def test_without_a_cluster_both_do_the_same(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for side in SIDES:
        folder = tmp_path / side
        folder.mkdir()
        monkeypatch.chdir(folder)
        results.append(run(core_of(side), folder))
    theirs, ours = results
    assert ours == theirs


def test_invalid_hyperparameters_end_alike(tmp_path: Path) -> None:
    codes = []
    for side in SIDES:
        with pytest.raises(SystemExit) as ended, core_of(side).init(checkpoint_storage=str(tmp_path)):
            raise importlib.import_module(side).InvalidHP
        codes.append(ended.value.code)
    assert codes[0] == codes[1]


# The ranks of a run exchange the same objects


def on_ranks(side: str, nodes: int, per_node: int, do: Callable[[Any], Any]) -> list[Any]:
    core = core_of(side)
    ports = {"pub_port": free_port(), "pull_port": free_port(), "force_tcp": True}

    def on_rank(rank: int) -> Any:
        context = core.DistributedContext(**numbers(rank, nodes, per_node), **ports)
        with contextlib.closing(context):
            result = do(context)
            context.gather(None)  # the real one may close before others have read its last broadcast
            return result

    return in_threads(range(nodes * per_node), on_rank)


OPERATIONS = ["gather", "allgather", "broadcast", "gather_local", "allgather_local", "broadcast_local"]
NUMBERS = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)])
def test_operations_and_numbers_are_the_same(nodes: int, per_node: int) -> None:
    def do(context: Any) -> list[Any]:
        stuff = [context.rank, None, {"rank": context.rank, "data": b"x" * 5000}, (context.local_rank, 1.5)]
        exchanged = [getattr(context, operation)(mine) for operation in OPERATIONS for mine in stuff]
        told = [context.get_rank(), context.get_local_rank(), context.get_size(), context.get_num_agents()]
        return [exchanged, told, [getattr(context, name) for name in NUMBERS]]

    real, ours = (on_ranks(side, nodes, per_node, do) for side in SIDES)
    assert ours == real


def test_exchanged_objects_are_copies_on_the_same_ranks() -> None:
    def do(context: Any) -> list[list[bool]]:
        copied = []
        for operation in OPERATIONS[:-1]:
            mine = [context.rank]
            found = getattr(context, operation)(mine)
            copied.append([one is mine for one in (found if isinstance(found, list) else [found])] + [found is mine])
        return copied

    real, ours = (on_ranks(side, 1, 3, do) for side in SIDES)
    assert ours == real


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
DEEPSPEED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@pytest.mark.parametrize(("method", "names"), [("from_torch_distributed", TORCHRUN), ("from_deepspeed", DEEPSPEED)])
def test_the_same_variables_are_read(method: str, names: tuple[str, ...]) -> None:
    alone, two_nodes = dict(zip(names, "010101", strict=True)), dict(zip(names, "020102", strict=True))
    for side in SIDES:
        context_class = core_of(side).DistributedContext
        with mock.patch.dict(os.environ, alone):
            assert getattr(context_class, method)().get_size() == 1
        with mock.patch.dict(os.environ, two_nodes), pytest.raises(AssertionError, match="chief_ip"):
            getattr(context_class, method)()


@pytest.mark.parametrize("missing", NUMBERS)
def test_all_numbers_are_asked_for(missing: str) -> None:
    given = {**dict(zip(NUMBERS, (0, 1) * 3, strict=True)), missing: None}
    for side in SIDES:
        with pytest.raises(ValueError, match=missing):
            core_of(side).DistributedContext(**given)
