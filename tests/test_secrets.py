"""Secrets among settings: what is masked, where, and that nobody uses a mask."""

from __future__ import annotations

import argparse
import copy
import json
import logging
import pickle
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
from det_lightning.masking import MASK, is_secret_name, leave_out_masked, mark_left_out, mask, mask_text, mask_url
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
        "environment_variables": ["EPOCHS=3", f"WANDB_API_KEY={SECRET}", f"DB=postgres://me:{SECRET}@host/db"],
    },
    "data": {"url": f"https://me:{SECRET}@host/data", "azure": f"AccountName=me;AccountKey={SECRET};", "shards": 3},
}
HPARAMS: dict[str, Any] = {"global_batch_size": 8, "pad_token": "<pad>", "max_tokens": 5, "hf_token": SECRET}


# Names

_SECRET = (
    "secret_key access_key accessKey aws_secret_access_key AWS_ACCESS_KEY_ID session_token registry_auth "
    "identitytoken password DB_PASSWORD DB_PASS passphrase api_key WANDB_API_KEY SIGNING_KEY hf_token "
    "GITHUB_TOKEN token credential connection_string AccountKey account-key client_secret private_keys "
    "secret_kye acces_key secretkey passwrod MYKEY jwt"
)
_ORDINARY = (
    "global_batch_size sort_key image_key key keys count_key pad_token bos_token mask_token tokenizer num_tokens "
    "max_tokens password_file secret_name forward_pass author authority bucket endpoint_url storage_path lr"
)
SECRET_NAMES = _SECRET.split()
ORDINARY_NAMES = _ORDINARY.split()


def test_names_of_secrets() -> None:
    assert [name for name in SECRET_NAMES if not is_secret_name(name)] == []
    assert [name for name in ORDINARY_NAMES if is_secret_name(name)] == []


# Masking

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text("abc ./_-", max_size=8))
NAMES = st.sampled_from([name for name in ORDINARY_NAMES if "_" in name])
SETTINGS = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=12
)


@hypothesis.given(SETTINGS)
def test_settings_without_secrets_stay(settings: Any) -> None:
    assert mask(settings) == settings
    assert leave_out_masked(settings, "settings") is settings


@pytest.mark.slow
@hypothesis.given(
    settings=st.dictionaries(NAMES, SETTINGS, max_size=3),
    name=st.sampled_from(SECRET_NAMES),
    wrap=st.sampled_from([lambda v: v, lambda v: [v], lambda v: {"a": v}, lambda v: {"a": [{"b": v}]}]),
    deep=st.lists(NAMES, max_size=3),
)
def test_a_secret_in_any_position_is_masked(settings: Any, name: str, wrap: Any, deep: list[str]) -> None:
    inner: dict[str, Any] = {**settings, name: wrap(SECRET)}
    for outer in deep:
        inner = {outer: [inner]}
    before = copy.deepcopy(inner)
    masked = mask(inner)
    assert SECRET not in json.dumps(masked)
    assert MASK in json.dumps(masked)
    assert inner == before
    assert mask(masked) == masked
    assert MASK not in json.dumps(leave_out_masked(masked, "settings"))


PASSWORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=4, max_size=12)


@hypothesis.given(password=PASSWORDS.filter(lambda text: not re.match(r"\d{1,5}([/?#]|$)", text)))
def test_any_password_of_a_url_is_masked(password: str) -> None:
    assert mask_url(f"sftp://me:{password}@host/path") == f"sftp://me:{MASK}@host/path"


@pytest.mark.parametrize("url", ["http://host:8080/a@b", "s3://bucket/a:b@c", "az://me@account/x:y", "/a/b:c@d"])
def test_a_port_and_a_path_are_not_a_password(url: str) -> None:
    assert mask_url(url) == mask_text(url) == url


@pytest.mark.parametrize(
    "text",
    [
        "no route to sftp://me:{}@host/x",
        "python train.py --api-key {} --lr 0.1",
        "AccountName=me;AccountKey={}==;EndpointSuffix=x",
        "https://host/x?sig={}&a=1",
        "{{'type': 's3', 'secret_key': '{}'}}",
        '{{"password": "{}"}}',
        "Authorization: Basic {}",
        "type: s3\nsecret_key: {}\n",
        "{{type: s3, secret_key: {}, x: [",
        "MY_TOKEN={}",
    ],
)
def test_secrets_in_a_text_are_masked(text: str) -> None:
    masked = mask_text(text.format(SECRET))
    assert SECRET not in masked
    assert masked.startswith(text.partition("{}")[0][:6].replace("{{", "{"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["a", "a://b:", "sk-", "eyJ-", "bearer ", "'a':'", "k=", "--k ", ",a: ", "{ ", "http://", "-", "\n-", "@"]
)
def test_long_texts_are_masked(part: str) -> None:
    text = part * (200_000 // len(part))
    assert mask_text(text) == mask(text) == text


def test_an_argument_of_a_command_is_masked() -> None:
    command = ["python", "train.py", "--api-key", SECRET, "--lr", "0.1", f"--token={SECRET}"]
    assert mask(command) == ["python", "train.py", "--api-key", MASK, "--lr", "0.1", f"--token={MASK}"]


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
    assert written["hparams"] == {**HPARAMS, "hf_token": MASK}
    assert written["experiment_config"]["data"]["url"] == f"https://me:{MASK}@host/data"
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
    assert (written["hparams_name"], written["hyper_parameters"]) == ("hparams", {**HPARAMS, "hf_token": MASK})


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


def test_objects_are_left_out_with_secrets(tmp_path: Path) -> None:
    train(tmp_path, {"options": argparse.Namespace(api_key=SECRET, lr=0.1), "where": Path(f"me;AccountKey={SECRET}")})
    assert files_that_hold(SECRET, tmp_path) == []
    (file,) = tmp_path.glob("*/load_data.json")
    assert json.loads(file.read_text())["experiment_config"].keys().isdisjoint({"options", "where"})


def test_secrets_come_from_the_call(tmp_path: Path) -> None:
    """Of a resume, and of a load."""
    train(tmp_path)
    trial = train(tmp_path, latest_checkpoint="last", max_length=pytorch.Batch(4))
    assert trial.hparams["hf_token"] == SECRET
    assert files_that_hold(SECRET, tmp_path) == []
    path = next(CheckpointStorage(tmp_path).newest_first())
    trial = pytorch.load_trial_from_checkpoint_path(path, trial_class=ReadingTrial, exp_conf=CONFIG, hparams=HPARAMS)
    assert (trial.config, trial.hparams) == (CONFIG, HPARAMS)


def test_left_out_beside_a_nested_secret() -> None:
    settings = mark_left_out({"db": {"password": MASK}}, "hparams", {"hparams": {"act": "function"}})
    hparams = leave_out_masked(settings, "hparams")
    with pytest.raises(KeyError, match=r"hparams\['act'\] was left out .* it was a function"):
        hparams["act"]
    with pytest.raises(KeyError, match="is a secret"):
        hparams["db"]["password"]


def test_a_masked_value_is_never_read(tmp_path: Path) -> None:
    train(tmp_path)
    path = next(CheckpointStorage(tmp_path).newest_first())
    trial = pytorch.load_trial_from_checkpoint_path(path, trial_class=ReadingTrial)
    assert MASK not in json.dumps([trial.config, trial.hparams])
    assert trial.config["data"]["shards"] == 3
    section = trial.config["checkpoint_storage"]
    assert section.get("secret_key") is None
    message = r"exp_conf\['checkpoint_storage'\]\['secret_key'\] is a secret, which was masked"
    with pytest.raises(KeyError, match=message):
        section["secret_key"]
    with pytest.raises(KeyError, match="'no_such_entry'"):
        section["no_such_entry"]
    with pytest.raises(ValueError, match=r"hparams\['hf_token'\] is a secret, which was masked"):
        trial.context.get_hparam("hf_token")
    with pytest.raises(ValueError, match="There is no hyperparameter 'other'"):
        trial.context.get_hparam("other")


def test_copies_stay_masked() -> None:
    left = leave_out_masked(mask(CONFIG), "exp_conf")["checkpoint_storage"]
    for again in (copy.deepcopy(left), pickle.loads(pickle.dumps(left))):
        assert again == left == {"type": "s3", "bucket": "b"}
        with pytest.raises(KeyError, match="masked"):
            again["access_key"]
        assert mask(again) == {**left, "access_key": MASK, "secret_key": MASK}


# Checkpoints of others, which have them in clear

LOAD_DATA = {"trial_cls_spec": "m:T", "hparams": HPARAMS, "experiment_config": CONFIG, "is_trainer": True}


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_show_masks_what_others_wrote(flags: list[str], tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, load_data=LOAD_DATA)
    result = CliRunner().invoke(app, ["checkpoint", "show", str(checkpoint), *flags])
    assert SECRET not in result.output
    assert MASK in result.output


@pytest.mark.parametrize("settings", [f"password: {SECRET}", {"hparams": [1], "experiment_config": CONFIG}, [HPARAMS]])
def test_damage_error_shows_no_secret(settings: Any, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    forget_checksums(checkpoint)
    torch.save({**read_state(checkpoint / "resume.pth"), "settings": settings}, checkpoint / "resume.pth")
    with pytest.raises(errors.IncompleteCheckpointError, match="'settings' must be") as raised:
        read_checkpoint(checkpoint)
    assert SECRET not in str(raised.value)


def test_printed_metadata_show_no_secret(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, by_determined=True)
    metadata = json.loads((checkpoint / "metadata.json").read_text())
    metric = {"name": f"https://me:{SECRET}@host", "value": 1.0}
    metadata |= {"trial": f"token={SECRET}", "experiment": "1", "metric": metric}
    (checkpoint / "metadata.json").write_text(json.dumps(metadata))
    for arguments in (["ls", tmp_path, "--best"], ["ls", tmp_path, "--best", "--json"], ["show", checkpoint]):
        assert SECRET not in CliRunner().invoke(app, ["checkpoint", *map(str, arguments)]).output


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
        ({"type": "s3", "bucket": "b", "secretkey": SECRET, "x": SECRET}, ["secretkey is unknown", "x is unknown"]),
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
