"""Trials on ``model_hub.huggingface``, with a model, a tokenizer and data that are made here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; run tox -e transformers")
pytest.importorskip("datasets", reason="datasets is not installed; run tox -e transformers")

import torch
import transformers

from det_lightning.errors import InvalidExperimentException
from det_lightning.model_hub import huggingface as hf
from det_lightning.model_hub.utils import AttrDict
from det_lightning.pytorch import init
from tests.experiments.running import events_of, run
from tests.launching import environment

TRIAL = Path(__file__).with_name("tiny_bert_trial.py")
WORDS = ["good", "bad", "film", "plot", "very", "not"]

pytestmark = pytest.mark.slow


def make_model(folder: Path) -> Path:
    """Write a tokenizer, a configuration and weights, as a model of the hub is."""
    folder.mkdir(parents=True)
    (folder / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    transformers.BertTokenizer(str(folder / "words.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=8, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def write_sentences(file: Path, count: int) -> str:
    lines = [f"{WORDS[n % 2]} {WORDS[n % 6]} {WORDS[n % 5]},{n % 2}" for n in range(count)]
    file.write_text("\n".join(["sentence,label", *lines]))
    return str(file)


def configuration_in(folder: Path, **hparams: Any) -> dict[str, Any]:
    given = {
        "pretrained_model_name_or_path": str(make_model(folder / "model")), "model_mode": "sequence-classification",
        "num_labels": 2, "use_pretrained_weights": False, "use_apex_amp": False, "learning_rate": 0.01,
        "weight_decay": 0.1, "num_warmup_steps": 2, "global_batch_size": 4,
    }  # fmt: skip
    training = write_sentences(folder / "train.csv", 24)
    return {
        "name": "small",
        "entrypoint": f"{TRIAL.stem}:TinyBertTrial",
        "data": {"train_file": training, "validation_file": write_sentences(folder / "validation.csv", 8)},
        "hyperparameters": {**given, **hparams},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 12}},
        "min_validation_period": {"batches": 6},
        "max_restarts": 0,
    }


def write_project(folder: Path, **hparams: Any) -> Path:
    folder.mkdir()
    shutil.copy(TRIAL, folder)
    file = folder / "const.yaml"
    file.write_text(json.dumps(configuration_in(folder, **hparams)))
    return file


def test_a_trial_trains_in_an_experiment(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project")
    run("run", config, tmp_path / "project", "--experiments", tmp_path, "--cpu", timeout_s=240)
    validations = events_of(tmp_path / "small-1", "validation")
    assert [event["steps_completed"] for event in validations] == [6, 12]
    first, last = (event["metrics"] for event in validations)
    assert last["loss"] != first["loss"]
    assert 0 <= last["accuracy"] <= 1


def test_conversion_checks_pass(tmp_path: Path) -> None:
    config = write_project(tmp_path / "project", use_pretrained_weights=True)
    options = ["--trial", f"{TRIAL.stem}:TinyBertTrial", "--trial-config", str(config)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "trains or deterministic or round-trips or contains",
        *options,
    ]
    done = subprocess.run(
        command, cwd=config.parent, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "[x] trains" in done.stdout
    assert "[x] checkpoint round-trips" in done.stdout


def trial_in(folder: Path, **hparams: Any) -> hf.BaseTransformerTrial:
    """Return a trial of the base class alone."""

    class Trial(hf.BaseTransformerTrial):
        def build_training_data_loader(self) -> Any: ...

        def build_validation_data_loader(self) -> Any: ...

    config = configuration_in(folder, **hparams)
    given = {name: value for name, value in config["hyperparameters"].items() if value is not None}
    with init(hparams=given, exp_conf={**config, "hyperparameters": given}) as context:
        return Trial(context)


def test_hyperparameters_choose_the_parts(tmp_path: Path) -> None:
    trial = trial_in(tmp_path, adam_beta1=0.8, dropout=0.5)
    assert isinstance(trial.model, transformers.BertForSequenceClassification)
    assert isinstance(trial.tokenizer, transformers.PreTrainedTokenizerBase)
    assert trial.hparams.num_training_steps == 12
    assert (trial.config.num_labels, trial.config.hidden_size) == (2, 8)
    assert trial.data_config.train_file == str(tmp_path / "train.csv")
    decaying, others = trial.optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"], decaying["betas"]) == (0.1, 0.0, (0.8, 0.999))
    names = {id(parameter): name for name, parameter in trial.model.named_parameters()}
    assert all("bias" in names[id(p)] or "LayerNorm.weight" in names[id(p)] for p in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)
    assert trial.grad_clip_fn is not None
    # In the middle of the warm-up after one batch, and then on a line to 0 after 12.
    rates = [trial.lr_scheduler.get_last_lr()[0]]
    for _ in range(12):
        trial.optimizer.step()
        trial.lr_scheduler.step()
        rates.append(trial.lr_scheduler.get_last_lr()[0])
    assert rates == pytest.approx([0.0, 0.005, *(0.001 * n for n in range(10, -1, -1))])


def test_optional_hyperparameters_are_obeyed(tmp_path: Path) -> None:
    choice = {"adafactor": True, "max_grad_norm": 0, "num_training_steps": 99, "lr_scheduler_type": "constant"}
    trial = trial_in(tmp_path, use_pretrained_weights=None, model_mode="base", **choice)
    assert isinstance(trial.optimizer, transformers.Adafactor)
    assert trial.grad_clip_fn is None
    assert (trial.hparams.num_training_steps, trial.hparams.use_pretrained_weights) == (99, True)
    saved = transformers.BertModel.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in trial.model.state_dict().items())


def test_wrong_hyperparameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidExperimentException, match="Trial needs the hyperparameters model_mode and use_apex_amp"):
        trial_in(tmp_path / "missing", model_mode=None, use_apex_amp=None)
    with pytest.raises(ValueError, match=r"model_mode must be one of base, pretraining, .*; got 'translation'"):
        trial_in(tmp_path / "unknown", model_mode="translation")


def test_each_part_can_be_named_alone() -> None:
    hparams = {"pretrained_model_name_or_path": "bert", "tokenizer_name": "words", "do_lower_case": True, "lr": 1}
    config, tokenizer, model = hf.default_parse_config_tokenizer_model_kwargs(hparams)
    shared = {"cache_dir": None, "revision": "main", "use_auth_token": False}
    assert config == {**shared, "pretrained_model_name_or_path": "bert"}
    assert tokenizer == {**shared, "pretrained_model_name_or_path": "words", "do_lower_case": True, "use_fast": True}
    assert model == config
    with pytest.raises(ValueError, match="neither pretrained_model_name_or_path nor config_name, model_name"):
        hf.default_parse_config_tokenizer_model_kwargs({"tokenizer_name": "words"})


def test_one_mapping_fills_several_dataclasses() -> None:
    given = AttrDict({"num_labels": 3, "train_file": "a.csv", "unknown": 1})
    config, data = hf.parse_dict_to_dataclasses((hf.ConfigKwargs, hf.DatasetKwargs), given)
    assert (config.num_labels, config.revision, data.train_file, data.dataset_name) == (3, "main", "a.csv", None)
    assert not hasattr(config, "finetuning_task")
    assert not hasattr(data, "unknown")
    (optimizer,) = hf.parse_dict_to_dataclasses((hf.OptimizerKwargs,), {"learning_rate": 1.0}, as_dict=True)
    assert (optimizer.learning_rate, optimizer.adam_epsilon) == (1.0, 1e-8)


def test_validation_data_are_split_off(tmp_path: Path) -> None:
    folder = tmp_path / "sentences"
    folder.mkdir()
    write_sentences(folder / "train.csv", 20)
    with pytest.raises(ValueError, match="has no validation data, but train"):
        hf.default_load_dataset({"dataset_name": str(folder)})
    loaded = hf.default_load_dataset({"dataset_name": str(folder), "validation_split_percentage": 25})
    assert {name: len(part) for name, part in loaded.items()} == {"train": 15, "validation": 5}


def test_data_files_are_loaded_by_their_type(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("one\ntwo\n")
    assert hf.default_load_dataset({"train_file": str(tmp_path / "train.txt")})["train"]["text"][:] == ["one", "two"]
    (tmp_path / "check.jsonl").write_text('{"words": 3}\n')
    assert hf.default_load_dataset({"validation_file": str(tmp_path / "check.jsonl")})["validation"][0] == {"words": 3}
    with pytest.raises(ValueError, match="set dataset_name, or train_file"):
        hf.default_load_dataset({})
