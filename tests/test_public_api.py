"""What the package offers, by name. A change here is one that users notice."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = {
    "det_lightning": """
        LOG_FORMAT ClusterInfo ExperimentConfig InvalidHP RendezvousInfo ResourcesInfo TrialContext TrialInfo
        __version__ adapters callbacks checkpoint compat core errors estimator experimental get_cluster_info
        import_from_path pytorch tensorboard util
    """,
    "det_lightning.pytorch": """
        Batch CheckpointLoadContext ClipGradsL2Norm ClipGradsL2Value DataLoader DistributedBatchSampler
        DistributedSampler Epoch LRScheduler MetricReducer PyTorchCallback PyTorchExperimentalContext PyTorchTrial
        PyTorchTrialContext Reducer RepeatBatchSampler RepeatSampler ReproducibleShuffleBatchSampler
        ReproducibleShuffleSampler ShouldExit SkipBatchSampler SkipSampler TorchData TrainUnit Trainer
        adapt_batch_sampler data_length init load_trial_from_checkpoint_path reset_parameters samplers to_device
    """,
    "det_lightning.pytorch.experimental": """
        TorchBatchProcessor TorchBatchProcessorContext get_default_device torch_batch_process
    """,
    "det_lightning.experimental": "test_one_batch",
    "det_lightning.horovod": "hvd",
    "det_lightning.util": """
        download_gcs_blob_with_backoff filter_duplicates has_param is_overridden merge_dicts
    """,
    "det_lightning.adapters": "DeterminedCheckpointIO TrialModule",
    "det_lightning.callbacks": "DeterminedCheckpoint DeterminedTensorBoard PreemptionHandler TorchProfiler",
    "det_lightning.core": """
        CheckpointContext ClusterInfo Context DistributedContext DownloadMode DummyDistributedContext EarlyExitReason
        ExperimentalCoreContext PreemptContext PreemptMode ProfilerContext SearcherContext SearcherMode
        SearcherOperation TensorboardMode TrainContext TrialInfo Unit get_cluster_info init
    """,
    "det_lightning.checkpoint": """
        CheckpointContent CheckpointInfo CheckpointPolicy CheckpointReading CheckpointRecord CheckpointStorage
        ResumeState Retention TrialState load_checkpoint open_checkpoint read_checkpoint
    """,
    "det_lightning.testing": "TrainedTrial assert_resumes assert_same_training run_trial",
    "det_lightning.adapters.strategies": "HorovodStrategy PerModelDDPStrategy PerModelFSDPStrategy",
    "det_lightning.errors": """
        CheckpointError CheckpointNotFound ConfigError ConfigMistake DamagedExperiment DetLightningError ExperimentError
        ExperimentInUse IncompleteCheckpointError
        InternalException InvalidCheckpointException InvalidConfigurationException InvalidDataTypeException
        InvalidExperimentException InvalidHP InvalidModelException MissingLinks PREEMPTED_EXIT_CODE
        Preempted ShouldExit StorageError
        UnsafeCheckpointError UnsupportedPart UnsupportedTrainerFlags
    """,
}


@pytest.mark.parametrize("module_name", PUBLIC)
def test_public_names_are_those_of_the_list(module_name: str) -> None:
    module = importlib.import_module(module_name)
    assert sorted(module.__all__) == sorted(PUBLIC[module_name].split())
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_package_of_commands_offers_no_names() -> None:
    names = vars(importlib.import_module("det_lightning.launch")).items()
    assert [name for name, value in names if name[0] != "_" and not inspect.ismodule(value)] == []


@pytest.mark.parametrize("module_name", ["det_lightning", "det_lightning.pytorch"])
def test_missing_name_is_an_attribute_error(module_name: str) -> None:
    module = importlib.import_module(module_name)
    with pytest.raises(AttributeError, match=f"module '{module_name}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018 (looking it up is the test)


def test_packages_on_disk_are_installed() -> None:
    # Python 3.10 has no TOML reader, and the list is plain enough to go without one.
    project = (ROOT / "pyproject.toml").read_text()
    (section,) = re.findall(r"(?ms)^\[tool\.setuptools\]$.*?^packages = \[(.*?)\]", project)
    on_disk = set()
    for source in ("det_lightning", "adapters", "callbacks"):
        installed = source if source == "det_lightning" else f"det_lightning.{source}"
        for file in (ROOT / source).rglob("__init__.py"):
            below = file.parent.relative_to(ROOT / source).parts
            if not (ROOT / source).joinpath(*below[:1]).is_symlink() or not below:
                on_disk.add(".".join([installed, *below]))
    assert sorted(re.findall(r'"(.+?)"', section)) == sorted(on_disk)


@pytest.mark.parametrize("name", ["adapters", "callbacks"])
def test_packages_have_one_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(ImportError, match=f"Import this package as det_lightning.{name}, not as {name}"):
        importlib.import_module(name)
