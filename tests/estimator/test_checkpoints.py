"""Checkpoints have TensorFlow's files, and those that Determined's releases for Estimators wrote beside them."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed; run tox -e estimator")

import numpy as np
import tensorflow as tf

from det_lightning import errors, estimator
from det_lightning.estimator._files import restore_rng
from tests.estimator.small_trials import SmallTrial, Trained, columns, premade, small_trial

pytestmark = pytest.mark.slow

OURS = ("metadata.json", "load_data.json", "trial_state.pkl", "state_dict.pth", "resume.pth", "ranks", "code")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three batches; tests change copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("code"))
        return Trained(SmallTrial, tmp_path_factory.mktemp("trained"), 3).checkpoint


class Served(SmallTrial):
    """Exports a model that takes examples, and one that takes tensors."""

    names: tuple[str, ...] = ("parsing", "raw")
    make = staticmethod(premade)

    def build_serving_input_receiver_fns(self) -> dict[str, Any]:
        spec = tf.feature_column.make_parse_example_spec(columns())
        functions = {
            "parsing": tf.estimator.export.build_parsing_serving_input_receiver_fn(spec),
            "raw": tf.estimator.export.build_raw_serving_input_receiver_fn(
                {"x": tf.compat.v1.placeholder(tf.float32, [None, 4])}
            ),
        }
        return {name: functions[name] for name in self.names}


def predict(checkpoint: Path) -> Any:
    """Return the probabilities of the model for one example."""
    feature = tf.train.Feature(float_list=tf.train.FloatList(value=[0.9, 0.8, 0.7, 0.6]))
    example = tf.train.Example(features=tf.train.Features(feature={"x": feature})).SerializeToString()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = estimator.load_estimator_from_checkpoint_path(str(checkpoint))
        outputs = model.signatures["predict"](tf.constant([example]))
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
        return session.run(outputs["probabilities"])


def test_checkpoint_has_determineds_files(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names >= {
        *("checkpoint", "graph.pbtxt", "model.ckpt-3.index", "model.ckpt-3.data-00000-of-00001", "model.ckpt-3.meta"),
        *("rng_state.pkl", "load_data.json", "metadata.json", "code"),
    }
    assert json.loads((trained / "load_data.json").read_text())["trial_type"] == "EstimatorTrial"
    metadata = json.loads((trained / "metadata.json").read_text())
    assert metadata["framework"] == f"tensorflow-{tf.__version__}"
    assert (metadata["format"], metadata["steps_completed"]) == ("saved_model", 3)
    random_states = pickle.loads((trained / "rng_state.pkl").read_bytes())
    assert set(random_states) == {"np_rng_state", "random_rng_state", "tf_rng_global_seed"}
    # The path in the state file does not depend on where it was written.
    assert tf.train.latest_checkpoint(str(trained)) == str(trained / "model.ckpt-3")
    reader = tf.compat.v1.train.NewCheckpointReader(str(trained / "model.ckpt-3"))
    assert reader.get_tensor("global_step") == 3


def test_saved_models_load(tmp_path: Path) -> None:
    checkpoint = Trained(Served, tmp_path, 3).checkpoint
    assert len([*checkpoint.glob("parsing/*/saved_model.pb")]) == len([*checkpoint.glob("raw/*/saved_model.pb")]) == 1
    with pytest.raises(errors.InvalidCheckpointException, match=r"2 SavedModels in .*parsing/\d+, raw/\d+"):
        estimator.load_estimator_from_checkpoint_path(str(checkpoint))
    assert predict(checkpoint / "parsing").shape == (1, 2)


def test_saved_model_needs_serving_functions(trained: Path, tmp_path: Path) -> None:
    one = Trained(type("Served", (Served,), {"names": ("parsing",)}), tmp_path / "one", 3).checkpoint
    assert np.all(predict(one) > 0)
    with pytest.raises(errors.CheckpointNotFound, match=r"no SavedModel.*build_serving_input_receiver_fns"):
        estimator.load_estimator_from_checkpoint_path(str(trained))


def as_written_by_determined(checkpoint: Path, directory: Path) -> Path:
    """Return a checkpoint as release 0.24 leaves it: with a path of another machine, and without our files."""
    shutil.copytree(checkpoint, directory, ignore=shutil.ignore_patterns(*OURS))
    (directory / "load_data.json").write_text('{"trial_type": "EstimatorTrial"}')
    (directory / "metadata.json").write_text(
        json.dumps({"determined_version": "0.24.0", "steps_completed": 3, "format": "saved_model"})
    )
    counts = {"trial_id": 1, "last_ckpt": 3, "step_id": 1, "last_val": 0, "steps_completed": 3}
    (directory / "workload_sequencer.pkl").write_bytes(pickle.dumps(counts))
    state = 'model_checkpoint_path: "/tmp/elsewhere/model.ckpt-3"\nall_model_checkpoint_paths: "/tmp/x/model.ckpt-3"\n'
    (directory / "checkpoint").write_text(state)
    return directory


def test_determineds_weights_resume(tmp_path: Path) -> None:
    trial = small_trial(make=premade)
    trained = Trained(trial, tmp_path, 3)
    as_written_by_determined(trained.checkpoint, tmp_path / "checkpoints" / "old")
    validated = Trained(trial, tmp_path, 3, latest_checkpoint="old").reports.validations[-1]
    assert validated["loss"] == trained.reports.validations[-1]["loss"]
    resumed = Trained(trial, tmp_path, 5, latest_checkpoint="old")
    assert len(resumed.reports.losses) == 2
    assert resumed.reports.validations[-1]["global_step"] == 5


def test_unsafe_random_states_are_refused(trained: Path, tmp_path: Path) -> None:
    old = as_written_by_determined(trained, tmp_path / "checkpoints" / "old")
    (old / "rng_state.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(errors.UnsafeCheckpointError, match=r"rng_state\.pkl refers to os\.system"):
        Trained(SmallTrial, tmp_path, 5, latest_checkpoint="old")


def test_a_missing_random_state_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = random.getstate()
    restore_rng(tmp_path)
    assert "has no random state" in caplog.text
    assert random.getstate() == before


def test_made_up_random_states_change_nothing(tmp_path: Path) -> None:
    numpy: Any = np.random.RandomState(0).get_state()
    position_outside = {"np_rng_state": (*numpy[:2], 10**8, 0, 0.0), "random_rng_state": (3, (), None)}
    (tmp_path / "rng_state.pkl").write_bytes(pickle.dumps(position_outside))
    before = np.random.get_state(legacy=False)["state"]["key"].tolist()
    with pytest.raises(errors.CheckpointError, match=r"rng_state\.pkl"):
        restore_rng(tmp_path)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before


@pytest.mark.parametrize("protocol", [3, 4])
def test_random_states_of_any_release_are_restored(protocol: int, tmp_path: Path) -> None:
    python, numpy = random.Random(5), np.random.RandomState(5)
    state = {"np_rng_state": numpy.get_state(), "random_rng_state": python.getstate(), "tf_rng_global_seed": 3}
    (tmp_path / "rng_state.pkl").write_bytes(pickle.dumps(state, protocol))
    restore_rng(tmp_path)
    assert (random.random(), np.random.rand()) == (python.random(), numpy.rand())


def test_missing_model_of_a_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    old = as_written_by_determined(trained, tmp_path / "checkpoints" / "old")
    (old / "model.ckpt-3.index").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match=r"names model\.ckpt-3, which has no index file"):
        Trained(SmallTrial, tmp_path, 5, latest_checkpoint="old")


def test_remote_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    whole = Trained(SmallTrial, tmp_path / "whole", 7)
    url = f"memory://{tmp_path.name}/estimators"
    first = Trained(SmallTrial, tmp_path, 3, checkpoint_storage=url)
    second = Trained(SmallTrial, tmp_path, 7, checkpoint_storage=url, latest_checkpoint="last")
    assert first.reports.losses + second.reports.losses == whole.reports.losses
