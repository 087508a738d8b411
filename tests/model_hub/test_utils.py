"""The functions of ``model_hub.utils``, which need neither transformers nor a network."""

from __future__ import annotations

import copy
import pickle
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_lightning.model_hub import utils


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([[[1, 2]], [[3, 4, 5], [6, 7, 8]]], [[1, 2, -100], [3, 4, 5], [6, 7, 8]]),
        ([[[[1], [2]]], [[[3]]]], [[[1], [2]], [[3], [-100]]]),
        ([[[0.25]], [[1, 2]]], [[0.25, -100.0], [1.0, 2.0]]),
    ],
)
def test_shorter_arrays_are_filled_up(arrays: list[Any], expected: list[Any]) -> None:
    filled = utils.expand_like([np.array(array) for array in arrays])
    assert filled.tolist() == expected
    assert filled.dtype == np.array(expected).dtype


def test_another_value_fills_up() -> None:
    filled = utils.expand_like([np.zeros((1, 1), dtype=np.uint8), np.zeros((1, 2), dtype=np.uint8)], fill=-0.5)
    assert filled.tolist() == [[0.0, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("shapes", [[], [(1, 2, 3), (1, 2, 4)], [(1,), (1, 2)]])
def test_unfit_arrays_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"expand_like\(\) needs"):
        utils.expand_like([np.zeros(shape) for shape in shapes])


def test_numpify_makes_arrays() -> None:
    for given in ([1, 2], np.array([1, 2]), torch.tensor([1.0, 2.0], requires_grad=True)):
        array = utils.numpify(given)
        assert isinstance(array, np.ndarray)
        assert array.tolist() == [1, 2]
    with pytest.raises(TypeError, match="got str"):
        utils.numpify("12")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configuration", "steps"),
    [
        ({"searcher": {"max_length": {"batches": 300}}}, 300),
        ({"searcher": {"max_length": {"records": 3000}}}, 187),
        ({"searcher": {"max_length": {"epochs": 3}}, "records_per_epoch": 124}, 21),
        ({"searcher": {"max_time": 50, "time_metric": "batches"}}, 50),
    ],
)
def test_length_of_a_configuration_is_a_number_of_steps(configuration: dict[str, Any], steps: int) -> None:
    assert utils.compute_num_training_steps(configuration, 16) == steps


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ({}, "no searcher.max_length with a unit"),
        ({"searcher": {"max_length": 30}}, "no searcher.max_length with a unit"),
        ({"searcher": {"max_length": {"epochs": 3}}, "records_per_epoch": 0}, "3 epochs, and there is no records_per"),
    ],
)
def test_missing_length_is_refused(configuration: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}.*\. Set the hyperparameter num_training_steps"):
        utils.compute_num_training_steps(configuration, 16)


@pytest.mark.parametrize("through", [lambda value: value, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_items_are_attributes(through: Any) -> None:
    settings = through(utils.AttrDict({"items": 1, "optimizer": {"lr": 0.1}}, name="bert"))
    assert (settings.name, settings.optimizer.lr, settings["items"]) == ("bert", 0.1, 1)
    settings.optimizer.lr = 0.2
    settings.steps = 5
    del settings.name
    assert dict(settings.items()) == {"items": 1, "optimizer": {"lr": 0.2}, "steps": 5}
    assert not hasattr(settings, "name")
    with pytest.raises(AttributeError, match="There is no item 'name'; the items are: 'items', 'optimizer', 'steps'"):
        settings.name  # noqa: B018 (looking it up is the test)
    with pytest.raises(AttributeError, match="'name'"):
        del settings.name


def test_a_file_is_downloaded_once(tmp_path: Path) -> None:
    (tmp_path / "some data.json?v=1").write_text("{}")  # here the server is the disk
    for _ in range(2):
        path = utils.download_url(str(tmp_path / "data" / "sets"), f"{tmp_path.as_uri()}/some%20data.json?v=1")
        assert path == str(tmp_path / "data" / "sets" / "some data.json")
        assert Path(path).read_text() == "{}"
        (tmp_path / "some data.json?v=1").write_text("changed")


def test_failed_downloads_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(urllib.error.URLError, match="missing"):
        utils.download_url(tmp_path / "data", f"{tmp_path.as_uri()}/missing.json")
    assert not (tmp_path / "data" / "missing.json").exists()
    with pytest.raises(ValueError, match="must end in the name of the file"):
        utils.download_url(tmp_path, "http://127.0.0.1")


def test_mmdetection_is_refused() -> None:
    with pytest.raises(ImportError, match=r"model_hub\.mmdetection is not covered: .* write a PyTorchTrial"):
        import det_lightning.model_hub.mmdetection  # noqa: F401
