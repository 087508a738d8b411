"""The examples that are projects: experiment files, a trial, a script; and readers for the data that they stand for."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from det_lightning.config import read_config
from tests.experiments.running import events_of
from tests.experiments.running import run as run_command
from tests.launching import TORCHRUN
from tests.porting.test_trials import load
from tests.tracked import tracked
from tests.warm_python import WarmPython

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CONFIGURATIONS = tracked("examples/*/*.yaml")
#: The file that train.py draws, and the metric of the search.
PROJECTS = {
    "mnist": ("mistakes.png", "validation_loss"),
    "cifar10": ("classes.png", "accuracy"),
    "detection": ("detections.png", "average_precision"),
    "metrics": ("scores.png", "sensitivity"),
    "finetuning": ("words.png", "accuracy"),
}


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_configurations_are_valid(file: Path) -> None:
    module, _, trial = str(read_config(file).entrypoint).partition(":")
    # The file of the search has its code in the directory of another example.
    folder = EXAMPLES / "digits" if file.parent.name == "search" else file.parent
    assert f"class {trial}(" in (folder / f"{module}.py").read_text()


def test_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    folders = {file.parent for file in tracked("examples/*/*.*") if file.suffix in (".py", ".yaml", ".ipynb")}
    assert [folder.name for folder in sorted(folders) if f"({folder.name}/README.md)" not in index] == []
    assert [folder.name for folder in sorted(folders) if not (folder / "README.md").exists()] == []


def test_pictures_of_the_docs_are_small() -> None:
    pictures = [file for file in (EXAMPLES.parent / "docs" / "images").iterdir() if file.suffix in (".png", ".svg")]
    assert len(pictures) >= len(PROJECTS)
    assert {file.name: file.stat().st_size for file in pictures if file.stat().st_size > 50_000} == {}


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_project_runs_as_an_experiment(project: str, tmp_path: Path) -> None:
    """One for a whole epoch and with a checkpoint that is kept, the others for a few batches."""
    whole = ["--config", "searcher.max_length.epochs=1", "--config", "max_restarts=0"]
    how = whole if project == "metrics" else ["--try"]
    folder = EXAMPLES / project
    run_command("run", folder / "const.yaml", folder, "--experiments", tmp_path, *how, is_warm=True)
    assert len([*(tmp_path / f"{project}-1").glob("checkpoints/*")]) == (how == whole)
    (validation,) = events_of(tmp_path / f"{project}-1", "validation")
    assert validation["metrics"][PROJECTS[project][1]] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_project_runs_as_a_script(project: str, warm_python: WarmPython, tmp_path: Path) -> None:
    done = warm_python.run(EXAMPLES / project / "train.py", "--epochs", "1", "--output", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    with Image.open(tmp_path / "out" / PROJECTS[project][0]) as picture:
        assert picture.width > 300
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.slow
def test_processes_of_a_trial_share_the_data(tmp_path: Path) -> None:
    overrides = ["--config", "searcher.max_length.epochs=1", "--config", "max_restarts=0", "--cpu"]
    folder = EXAMPLES / "distributed"
    run_command(
        "run", folder / "distributed.yaml", folder, "--experiments", tmp_path, *overrides, timeout_s=300, is_warm=True
    )
    reports = (tmp_path / "distributed-1" / "trials" / "1" / "metrics.jsonl").read_text().splitlines()
    training = next(entry["metrics"] for entry in map(json.loads, reports) if entry["group"] == "training")
    assert (training["waves_of_rank_0"], training["waves_of_rank_1"]) == (600, 600)


@pytest.mark.slow
def test_processes_end_with_the_same_weights(warm_python: WarmPython, tmp_path: Path) -> None:
    arguments = [str(EXAMPLES / "distributed" / "train.py"), "--epochs", "1", "--output", str(tmp_path)]
    command = [warm_python.executable, *TORCHRUN, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    digests = re.findall(r"^Weights of rank \d  (\w+)$", done.stdout, re.MULTILINE)
    assert len(digests) == 2
    assert len(set(digests)) == 1


def write_idx(file: Path, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = header + bytes(values.flatten().tolist())
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_read(tmp_path: Path, suffix: str) -> None:
    pixels = torch.arange(3 * 28 * 28).view(3, 28, 28) % 256
    for part, count in (("train", 3), ("t10k", 2)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", pixels[:count])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", torch.arange(count) + 5)
    training, validation = load(EXAMPLES / "mnist/data.py").load(str(tmp_path))
    assert (len(training), len(validation)) == (3, 2)
    image, label = training[2]
    assert torch.equal((255 * image).round().long(), pixels[2:])
    assert label == 7


def test_cifar10_is_read(tmp_path: Path) -> None:
    data = load(EXAMPLES / "cifar10/data.py")
    for number, name in enumerate([*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]):
        (tmp_path / name).write_bytes(bytes([number]) + bytes([10] * 1024 + [20] * 1024 + [30] * 1024))
    training, validation, classes = data.load(str(tmp_path))
    assert training.tensors[1].tolist() == [0, 1, 2, 3, 4]
    assert validation[0][0].shape == (3, 32, 32)
    assert validation[0][0].float().mean(dim=(1, 2)).tolist() == [10, 20, 30]
    assert classes[int(validation[0][1])] == "dog"
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no data_batch_2\.bin"):
        data.load(str(tmp_path))


def test_coco_is_read(tmp_path: Path) -> None:
    data = load(EXAMPLES / "detection/data.py")
    content = {
        "categories": [{"id": 7, "name": "train"}, {"id": 44, "name": "bottle"}],
        "images": [{"id": 1, "file_name": "1.jpg"}, {"id": 2, "file_name": "2.jpg"}],
        "annotations": [
            {"image_id": 1, "category_id": 44, "bbox": [20, 10, 40, 30], "iscrowd": 0},
            {"image_id": 1, "category_id": 7, "bbox": [0, 0, 100, 50], "iscrowd": 1},
            {"image_id": 2, "category_id": 7, "bbox": [0, 0, 100, 50], "iscrowd": 1},
        ],
    }
    (tmp_path / "annotations").mkdir()
    for part in ("train2017", "val2017"):
        (tmp_path / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
        (tmp_path / part).mkdir()
        Image.new("RGB", (100, 50), (200, 100, 0)).save(tmp_path / part / "1.jpg")
    training, validation, classes = data.load(str(tmp_path), size=64)
    assert (len(training), len(validation), classes) == (1, 1, ["train", "bottle"])
    image, boxes, numbers = training[0]
    assert image.shape == (3, 64, 64)
    assert image[0, :32].min() > 190 and image[:, 32:].max() == 0
    assert torch.allclose(boxes, torch.tensor([[12.8, 6.4, 38.4, 25.6]]))
    assert numbers.tolist() == [2]
