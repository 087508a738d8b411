"""Secrets among settings: what is masked, where, that nobody uses a mask, and that hyperparameters are no secrets."""

from __future__ import annotations

import copy
import json
import logging
import re
import traceback
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from typer.testing import CliRunner

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from det_lightning.checkpoint import CheckpointStorage, read_checkpoint
from det_lightning.checkpoint.safe_load import read_state
from det_lightning.checkpoint.storage.location import Location, explain_errors
from det_lightning.checkpoint.storage.storage_config import storage_from_config
from det_lightning.cli.app import app
from det_lightning.masking import MASK, find_secrets, mask_config, mask_settings, mask_text, mask_url
from tests.checkpoint.made_checkpoints import forget_checksums, write_checkpoint
from tests.lightning import pl
from tests.lightning import trainer as make_trainer
from tests.trials import SmallTrial

SECRET = "hunter2-4711"
CONFIG: dict[str, Any] = {
    "name": "an experiment",
    "searcher": {"metric": "validation_loss"},
    "checkpoint_storage": {"type": "s3", "bucket": "b", "access_key": SECRET, "secret_key": SECRET},
    "environment": {
        "registry_auth": {"username": SECRET, "password": SECRET, "identitytoken": SECRET},
        "environment_variables": ["HOME", f"LOGIN={SECRET}", f"DB=postgres://me:{SECRET}@host/db"],
    },
    "data": {"url": "https://me:of-the-data@host/data", "api_key": "of-the-data", "shards": 3},
}
#: Hyperparameters with names and values like those of secrets.
HPARAMS: dict[str, Any] = {
    "global_batch_size": 8,
    "pw": 3,
    "pass": 2,
    "cookies": "chocolate",
    "auth": 0.5,
    "sas": [1, 2],
    "dsn": None,
    "storage_key": {"password_dim": 8, "secret": [{"token": "<pad>"}]},
    "api_key": f"{MASK}-and-more",
    "stars": ["a", MASK],
    "environment": {"environment_variables": ["A=b"]},
    "url": "https://me:of-the-hparams@host?sig=abc",
}


# Masking


@pytest.mark.parametrize(
    ("section", "given", "masked"),
    [
        ("checkpoint_storage", {"secret_key": 4711, "type": "s3"}, {"secret_key": MASK, "type": "s3"}),
        ("checkpoint_storage", {"endpoint_url": "https://me:a@host"}, {"endpoint_url": f"https://me:{MASK}@host"}),
        ("checkpoint_storage", {"account_url": "https://h?sig=a&b=1"}, {"account_url": f"https://h?sig={MASK}&b=1"}),
        ("tensorboard_storage", {"credential": "a", "prefix": ""}, {"credential": MASK, "prefix": ""}),
        ("data_layer", {"access_key": None, "bucket": "b"}, {"access_key": None, "bucket": "b"}),
        (
            "environment",
            {"registry_auth": {"auth": "a"}, "image": "i"},
            {"registry_auth": {"auth": MASK}, "image": "i"},
        ),
        (
            "environment",
            {"environment_variables": ["A", "B=c=d\ne"]},
            {"environment_variables": ["A", f"B={MASK}"]},
        ),
        (
            "environment",
            {"environment_variables": {"cpu": ["A=b"], "gpu": ("B=c",), "C": "d"}},
            {"environment_variables": {"cpu": [f"A={MASK}"], "gpu": (f"B={MASK}",), "C": MASK}},
        ),
        ("integrations", {"pachyderm": {"dataset": {"token": "a"}}}, {"pachyderm": {"dataset": {"token": MASK}}}),
    ],
)
def test_secrets_are_known_by_their_fields(section: str, given: dict[str, Any], masked: dict[str, Any]) -> None:
    before = copy.deepcopy(given)
    assert mask_config({section: given}) == mask_config({section: masked}) == {section: masked}
    assert given == before
    both = mask_settings({"hparams": {section: given}, "experiment_config": {section: given}})
    assert both == {"hparams": {section: given}, "experiment_config": {section: masked}}


PASSWORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=4, max_size=12)


@hypothesis.given(password=PASSWORDS.filter(lambda text: not re.match(r"\d{1,5}([/?#]|$)", text)))
def test_any_password_of_a_url_is_masked(password: str) -> None:
    assert mask_url(f"sftp://me:{password}@host/path") == f"sftp://me:{MASK}@host/path"


@pytest.mark.parametrize("url", ["http://host:8080/a@b", "s3://bucket/a:b@c", "az://me@account/x:y", "/a/b:c@d"])
def test_a_port_and_a_path_are_not_a_password(url: str) -> None:
    assert mask_url(url) == mask_text(url) == url


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"no route to sftp://me:{SECRET}@host/x", f"no route to sftp://me:{MASK}@host/x"),
        (f"https://host/x?sig={SECRET}&a=1", f"https://host/x?sig={MASK}&a=1"),
        (f"X-Amz: ?X-Amz-Signature={SECRET}", f"X-Amz: ?X-Amz-Signature={MASK}"),
        ("python train.py --api-key a --token=b", "python train.py --api-key a --token=b"),
        (f"a {SECRET}: b", f"a {MASK}: b"),
    ],
)
def test_secrets_in_a_text_are_masked(text: str, masked: str) -> None:
    variables = {"environment": {"environment_variables": [f"LOGIN={SECRET}", "MODE=clear"]}}
    assert mask_text(text, find_secrets(variables)) == masked


@pytest.mark.slow
@pytest.mark.parametrize("part", ["a", "a://b:", "http://", "a://b:c", "?sig=", "-", "@"])
def test_long_texts_are_masked(part: str) -> None:
    text = part * (200_000 // len(part))
    assert len(mask_text(text)) > 0


# What a run writes and what it reads


class ReadingTrial(SmallTrial):
    """Keeps what its context told it."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.config = context.get_experiment_config()
        self.hparams = context.get_hparams()


def train(storage: Any, config: dict[str, Any] = CONFIG, hparams: dict[str, Any] = HPARAMS, **fit: Any) -> ReadingTrial:
    with pytorch.init(hparams=hparams, exp_conf=config, enable_tensorboard_logging=False) as context:
        trial = ReadingTrial(context)
        trainer = pytorch.Trainer(trial, context, enable_progress_bar=False)
        fit = {"max_length": pytorch.Batch(2), **fit}
        trainer.fit(checkpoint_storage=storage, **fit)
    return trial


def files_that_hold(secret: str, directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [str(path.relative_to(directory)) for path in files if secret.encode() in path.read_bytes()]


def test_run_reads_secrets_and_writes_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = copy.deepcopy(CONFIG)
    with caplog.at_level(logging.DEBUG):
        trial = train(tmp_path, given)
    assert trial.config is given
    assert given == CONFIG
    assert trial.hparams == HPARAMS
    assert files_that_hold(SECRET, tmp_path) == []
    assert SECRET not in caplog.text
    (file,) = tmp_path.glob("*/load_data.json")
    written = json.loads(file.read_text())
    assert written["hparams"] == HPARAMS
    assert written["experiment_config"]["data"] == CONFIG["data"]
    assert written["experiment_config"]["checkpoint_storage"]["bucket"] == "b"


def test_lightnings_files_get_no_secrets(tmp_path: Path) -> None:
    module = TrialModule(ReadingTrial, HPARAMS, exp_conf=CONFIG)
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = make_trainer(max_steps=2, logger=logger, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert module.trial.hparams == HPARAMS
    assert files_that_hold(SECRET, tmp_path) == []
    assert list(tmp_path.rglob("hparams.yaml")) != []
    written = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert (written["hparams_name"], written["hyper_parameters"]) == ("hparams", HPARAMS)
    assert TrialModule.load_from_checkpoint(tmp_path / "last.ckpt", trial=ReadingTrial).trial.hparams == HPARAMS


def test_lightning_logs_no_password(caplog: pytest.LogCaptureFixture) -> None:
    url = f"memory://me:{SECRET}@host/lightning"
    train(url)
    path = CheckpointStorage(url).newest()
    trainer = make_trainer()
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        trainer.fit(TrialModule(ReadingTrial, HPARAMS, exp_conf=CONFIG), ckpt_path=path)
        with pytest.raises(errors.CheckpointNotFound) as raised:
            trainer.fit(TrialModule(ReadingTrial, HPARAMS, exp_conf=CONFIG), ckpt_path=f"{path}-gone")
    assert f"me:{MASK}@host" in caplog.text
    assert SECRET not in f"{caplog.text} {raised.value}"


def test_fall_back_logs_no_password(caplog: pytest.LogCaptureFixture) -> None:
    url = f"memory://me:{SECRET}@host/fall-back"
    train(url, checkpoint_period=pytorch.Batch(1), checkpoint_policy="all")
    newest, before = CheckpointStorage(url).newest_first()
    location = Location.parse(newest)
    location.fs.pipe_file(f"{location.path}/state_dict.pth", b"damaged")
    train(url, max_length=pytorch.Batch(3), latest_checkpoint="last")
    assert f"The run resumes from the checkpoint before, {mask_url(before)}." in caplog.text
    assert SECRET not in caplog.text


def test_secrets_come_from_the_call(tmp_path: Path) -> None:
    """Of a resume, and of a load."""
    train(tmp_path)
    trial = train(tmp_path, latest_checkpoint="last", max_length=pytorch.Batch(4))
    assert trial.config["checkpoint_storage"]["secret_key"] == SECRET
    assert files_that_hold(SECRET, tmp_path) == []
    path = next(CheckpointStorage(tmp_path).newest_first())
    trial = pytorch.load_trial_from_checkpoint_path(path, trial_class=ReadingTrial, exp_conf=CONFIG, hparams=HPARAMS)
    assert (trial.config, trial.hparams) == (CONFIG, HPARAMS)


def test_masks_come_back_as_text_and_open_no_storage(tmp_path: Path) -> None:
    """Also from a checkpoint of what was loaded. Determined's master shows the same text."""
    train(tmp_path / "first")
    loaded = pytorch.load_trial_from_checkpoint_path(
        next(CheckpointStorage(tmp_path / "first").newest_first()), trial_class=ReadingTrial
    )
    train(tmp_path / "second", loaded.config, loaded.hparams)
    for storage in ("first", "second"):
        path = next(CheckpointStorage(tmp_path / storage).newest_first())
        trial = pytorch.load_trial_from_checkpoint_path(path, trial_class=ReadingTrial)
        assert trial.hparams == HPARAMS
        assert trial.config["data"] == CONFIG["data"]
        section = trial.config["checkpoint_storage"]
        assert section == {"type": "s3", "bucket": "b", "access_key": MASK, "secret_key": MASK}
        with pytest.raises(ValueError, match="secret_key is masked: pass"):
            storage_from_config(section)


def test_a_resume_says_nothing_of_masks_of_earlier_releases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, CONFIG, {"global_batch_size": 8, "token": MASK})
    train(
        tmp_path, CONFIG, {"global_batch_size": 8, "token": "t"}, latest_checkpoint="last", max_length=pytorch.Batch(3)
    )
    assert "hparams differ" not in caplog.text


# Checkpoints of others, which have them in clear

LOAD_DATA = {"trial_cls_spec": "m:T", "hparams": HPARAMS, "experiment_config": CONFIG, "is_trainer": True}


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_show_masks_what_others_wrote(flags: list[str], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, load_data=LOAD_DATA)
    result = CliRunner().invoke(app, ["checkpoint", "show", str(checkpoint), *flags])
    assert SECRET not in result.output
    assert MASK in result.output


def test_damage_error_shows_no_secret(tmp_path: Path) -> None:
    settings = {"hparams": [1], "experiment_config": {"environment": CONFIG["environment"]}}
    checkpoint = write_checkpoint(tmp_path)
    forget_checksums(checkpoint)
    torch.save({**read_state(checkpoint / "resume.pth"), "settings": settings}, checkpoint / "resume.pth")
    with pytest.raises(errors.IncompleteCheckpointError, match="'settings' must be") as raised:
        read_checkpoint(checkpoint)
    assert SECRET not in str(raised.value)


@pytest.mark.slow
def test_exports_and_imports_have_no_secrets(tmp_path: Path) -> None:
    checkpoint, file = write_checkpoint(tmp_path / "from", load_data=LOAD_DATA), tmp_path / "one.ckpt"
    assert files_that_hold(SECRET, checkpoint) == ["load_data.json"]  # by hand, as Determined writes it
    run = CliRunner().invoke
    assert run(app, ["checkpoint", "export", str(checkpoint), "--to", "lightning", "-o", str(file)]).exit_code == 0
    assert SECRET.encode() not in file.read_bytes()
    (tmp_path / "into").mkdir()
    assert run(app, ["checkpoint", "import", str(file), str(tmp_path / "into")]).exit_code == 0
    assert files_that_hold(SECRET, tmp_path / "into") == []


# Storages


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"type": "s3", "bucket": "b", "secret_kye": SECRET}, ["secret_kye is unknown (did you mean secret_key?)"]),
        ({"type": "s3", "bucket": "b", "secret_key": [SECRET]}, ["secret_key must be a string; got a value"]),
        ({"type": "s3", "prefix": f"s3://me:{SECRET}@host/.."}, ["bucket is missing", f"s3://me:{MASK}@host/.."]),
        ({"type": f"s3://me:{SECRET}@host"}, ["type must be one of"]),
    ],
)
def test_section_errors_show_no_secret(section: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError, match="checkpoint_storage") as raised:
        CheckpointStorage(section)
    assert [part for part in named if part not in str(raised.value)] == []
    assert SECRET not in str(raised.value)


MASKED_S3 = {"type": "s3", "bucket": "b", "access_key": MASK, "secret_key": MASK}


def test_masked_secret_has_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call or the environment."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    options = {"key": "k", "secret": "s"}
    assert storage_from_config(MASKED_S3, options) == ("s3://b", options)
    with pytest.raises(ValueError, match="access_key is masked: pass the option 'key', or set AWS_ACCESS_KEY_ID") as e:
        CheckpointStorage(MASKED_S3)
    assert "secret_key is masked" in str(e.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert storage_from_config(MASKED_S3) == ("s3://b", options)
    with pytest.raises(errors.StorageError, match="is masked: write the password into the URL, or pass the option"):
        CheckpointStorage(f"sftp://me:{MASK}@127.0.0.1:1/x")


@pytest.mark.parametrize("url", [f"nosuch://me:{SECRET}@host/x", f"sftp://me:{SECRET}@127.0.0.1:1/x"])
def test_unusable_url_shows_no_password(url: str) -> None:
    with pytest.raises(errors.StorageError, match=re.escape(f"://me:{MASK}@")) as raised:
        CheckpointStorage(url)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_errors_show_no_password() -> None:
    with pytest.raises(errors.StorageError) as raised:
        CheckpointStorage("sftp://127.0.0.1:1/x", options={"username": "me", "password": SECRET, "timeout": SECRET})
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    assert SECRET not in str(errors.InvalidConfigurationException(CONFIG, "wrong"))
    with pytest.raises(errors.StorageError, match="Failed while looking") as raised, explain_errors("looking"):
        raise ConnectionError(f"no answer from https://me:{SECRET}@host")
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_location_hides_its_password() -> None:
    place = Location.parse(f"memory://me:{SECRET}@host/storage")
    assert SECRET not in f"{place} {place!r} {place / 'x'}"
    assert (place / "x").url == f"memory://me:{SECRET}@host/storage/x"
    (place / "x" / "file").write(b"1")
    assert Location.parse((place / "x").url).list_names() == ["file"]


def test_checkpoint_path_hides_password(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"memory://me:{SECRET}@host/run"
    with caplog.at_level(logging.DEBUG, "det_lightning"):
        train(url)
    storage = CheckpointStorage(url)
    newest = next(storage.newest_first())
    assert storage.find(newest) == newest
    assert pytorch.load_trial_from_checkpoint_path(newest, trial_class=ReadingTrial).config["name"] == "an experiment"
    with pytest.raises(errors.CheckpointNotFound, match=re.escape(MASK)) as raised:
        storage.find(f"{url}/none")
    shown = capfd.readouterr()
    assert SECRET not in f"{storage} {raised.value} {caplog.text} {shown.out} {shown.err}"


@pytest.mark.parametrize("option", [f"secret-key={SECRET}", f"secret={{{SECRET}", f"token=[{SECRET}"])
def test_wrong_option_shows_no_value(option: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoint", "ls", str(tmp_path), "--option", option])
    assert result.exit_code == 2
    assert SECRET not in result.output
    assert option.partition("=")[0] in result.output
