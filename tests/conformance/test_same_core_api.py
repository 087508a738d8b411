"""The Core API has the methods and arguments of Determined's, and does the same without a cluster."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.sides import SIDES

CLASSES = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "ExperimentalCoreContext",
    "PreemptContext",
    "ProfilerContext",
    "SearcherContext",
    "SearcherOperation",
    "TrainContext",
]
ENUMS = ["DownloadMode", "EarlyExitReason", "PreemptMode", "SearcherMode", "TensorboardMode", "Unit"]


def core_of(side: str) -> Any:
    importlib.import_module(side)
    return importlib.import_module(f"{side}.core")


def methods_of(cls: type) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(cls) if not name.startswith("_")}


def shown(default: Any) -> Any:
    return default.value if isinstance(default, enum.Enum) else "a function" if callable(default) else default


def list_parameters(function: Any) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(function)
    return [(one.name, one.kind, shown(one.default)) for one in signature.parameters.values() if one.name != "_"]


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_take_the_same_arguments(name: str) -> None:
    theirs, ours = (methods_of(getattr(core_of(side), name)) for side in SIDES)
    assert theirs.keys() <= ours.keys()
    for method, member in theirs.items():
        if not callable(member):
            continue
        expected, found = list_parameters(member), list_parameters(ours[method])
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


def outcome(action: Any) -> Any:
    try:
        return action()
    except Exception as error:
        return type(error).__name__


def complete(operation: Any) -> int:
    operation.report_progress(1)
    operation.report_completed(0.5)
    return int(operation.length)


def run_checkpoints(core: Any, folder: Path) -> list[Any]:
    own = folder / "own"
    (own / "part" / "empty").mkdir(parents=True)
    (own / "part" / "data").write_text("data")
    (own / "model").write_text("model")
    linked = folder / "linked"
    (linked / "of" / "script").mkdir(parents=True)
    (linked / "of" / "script" / "run").write_text("run")
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
        with checkpoint.store_path({"steps_completed": 2}) as (path, storage_id):
            (path / "file").write_text("content")
            seen.append((path.name == storage_id, path.is_dir()))
        look(storage_id)
        with checkpoint.store_path({"steps_completed": 3}, shard=True) as (path, storage_id):
            (path / "file").write_text("content")
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
