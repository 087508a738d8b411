"""Exports a checkpoint as a single file for other programs, or merges a sharded one to Determined's format."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from det_lightning import errors
from det_lightning.checkpoint.format import layout
from det_lightning.checkpoint.format.code_copy import CodeCopier
from det_lightning.checkpoint.format.content import CheckpointContent
from det_lightning.checkpoint.format.layout import CHECKSUM_KEY, split_code
from det_lightning.checkpoint.format.lightning_file import TRIAL_KEY, split_models, to_lightning, to_weights
from det_lightning.checkpoint.format.shards import map_tensors
from det_lightning.checkpoint.format.standard_values import save_state
from det_lightning.checkpoint.safe_load import read_checkpoint
from det_lightning.checkpoint.storage.checkpoint_storage import CheckpointStorage
from det_lightning.escaping import escape, name_some
from det_lightning.files.local_files import copy_mode
from det_lightning.missing_parts import how_to_install


def require_tensors(content: CheckpointContent) -> None:
    """Raise an ``InvalidCheckpointException`` if the models of a checkpoint have no tensor."""
    found: list[str] = []
    map_tensors(to_weights(content), lambda name, _: found.append(name), "", torch.Tensor)
    if not found:
        raise errors.InvalidCheckpointException(
            f"{content.source} holds no tensor in its models, so nothing is written. The weights of an "
            "EstimatorTrial are in TensorFlow's files; use the code that wrote the checkpoint."
        )


def export_weights(content: CheckpointContent, file: pathlib.Path) -> None:
    """Write the weights with ``torch.save``; see ``to_weights`` for the names."""
    with _replacing(file) as unfinished:
        save_state(to_weights(content), unfinished)


def export_lightning(content: CheckpointContent, file: pathlib.Path) -> None:
    """Write a Lightning ``.ckpt`` file; see ``to_lightning``."""
    with _replacing(file) as unfinished:
        save_state(to_lightning(content), unfinished)


def export_for_module(
    content: CheckpointContent, module: torch.nn.Module, hparams_name: str | None, file: pathlib.Path
) -> None:
    """Write a Lightning ``.ckpt`` file whose weights have the names of a LightningModule with the same models.

    ``module`` is such an object, and gets the weights; weights outside the models keep their values. ``hparams_name``
    is the parameter of its class that takes all hyperparameters, None if they are passed by their own names. The file
    has weights, optimizers and schedulers, but no state of Lightning's loops, so epochs start at 0 again.

    Raises:
        InvalidCheckpointException: the module lacks a model of the checkpoint, or several parts fit a model.
    """
    ckpt = to_lightning(content)
    models, _ = split_models(ckpt.pop("state_dict"))
    for part, model in _match_parts(models, module):
        try:
            # Not a change of names: another attribute of the module may hold a part of this part.
            part.load_state_dict(model)
        except RuntimeError as e:
            raise errors.InvalidCheckpointException(
                f"{type(part).__name__} in {type(module).__name__} does not load its weights: {e}"
            ) from e
    left_out = (TRIAL_KEY, "loops", "callbacks", "hparams_name")
    ckpt = {name: value for name, value in ckpt.items() if name not in left_out}
    with _replacing(file) as unfinished:
        hparams = {} if hparams_name is None else {"hparams_name": hparams_name}
        save_state({**ckpt, **hparams, "state_dict": module.state_dict()}, unfinished)


def _match_parts(
    models: list[OrderedDict[str, Any]], module: torch.nn.Module
) -> list[tuple[torch.nn.Module, OrderedDict[str, Any]]]:
    """Return each model that has weights with the only part of a module whose weights have the same names and shapes.

    The order of parts proves nothing: a trial may wrap models in another order than its attributes, or not all of them.
    """
    parts = [(name, part, part.state_dict(keep_vars=True)) for name, part in module.named_modules() if name]
    matched: dict[str, tuple[torch.nn.Module, OrderedDict[str, Any]]] = {}
    for index, model in enumerate(models):
        if not model:
            continue
        # The first of several parts that share their tensors stands for all.
        fitting: dict[tuple[int, ...], tuple[str, torch.nn.Module]] = {}
        for name, part, weights in parts:
            if _describe_shapes(weights) == _describe_shapes(model):
                fitting.setdefault(_identify(part, weights), (name, part))
        names = [name for name, _ in fitting.values()]
        shown = f"the weights of model {index}: {name_some(sorted(model))}"
        if len(names) > 1:
            raise errors.InvalidCheckpointException(
                f"{type(module).__name__} has {len(names)} parts that fit {shown}. A checkpoint does not name its "
                f"models, so {name_some(names)} cannot be told apart; export with --to weights, and load by hand."
            )
        if not names or names[0] in matched:
            raise errors.InvalidCheckpointException(f"{type(module).__name__} has no part with {shown}.")
        ((_, found),) = fitting.values()
        matched[names[0]] = found, model
    return [*matched.values()]


def _describe_shapes(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if is_lazy(value) else getattr(value, "shape", None) for name, value in weights.items()}


def _identify(part: torch.nn.Module, weights: Mapping[str, Any]) -> tuple[int, ...]:
    """Return a key that parts with the same tensors share."""
    return tuple(id(value) for value in weights.values() if isinstance(value, torch.Tensor)) or (id(part),)


def export_safetensors(content: CheckpointContent, file: pathlib.Path) -> list[str]:
    """Write the weights in the safetensors format; see ``to_weights`` for the names.

    Tensors that share memory become separate. Return the names of entries, such as ``_extra_state``, that are left out
    because they are not tensors.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as e:
        raise errors.CheckpointError(
            f"The export as safetensors needs safetensors: {how_to_install('safetensors')}"
        ) from e
    weights = to_weights(content)
    metadata = {
        "format": "pt",
        "checkpoint": content.name,
        "steps_completed": str(content.trial_state.batches_trained),
        "trial_class": content.trial_class or "",
    }
    left_out = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    with _replacing(file) as unfinished:
        try:
            save_file(_separate_tensors(weights), unfinished, metadata)
        except OSError:
            raise
        except Exception as e:  # the library's errors have no common base
            raise errors.CheckpointError(
                f"{content.directory or content.source} cannot be written as safetensors: {e}"
            ) from e
    return left_out


def _separate_tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            continue
        tensor = value.detach()
        if tensor.layout is torch.strided:
            tensor = tensor.contiguous()
            address = tensor.untyped_storage().data_ptr()
            tensor = tensor.clone() if address in seen else tensor
            seen.add(address)
        tensors[name] = tensor
    return tensors


@contextlib.contextmanager
def _replacing(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the path of a temporary file, and give the file its final name after the block.

    The file is in a directory of its own, since safetensors writes further temporary files beside it.
    """
    file = pathlib.Path(os.path.realpath(file))  # the target of a link is replaced, and not the link
    try:
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", suffix=".tmp", dir=file.parent) as directory:
            unfinished = pathlib.Path(directory, "unfinished")
            yield unfinished
            copy_mode(file, unfinished)
            unfinished.replace(file)
    except (OSError, RuntimeError) as e:  # torch.save reports a full disk by a RuntimeError
        raise errors.StorageError(f"{file} cannot be written: {e}") from e


def merge_checkpoint(directory: pathlib.Path, storage: CheckpointStorage, *, trusted: bool = False) -> str:
    """Write the sharded checkpoint in a directory as a new checkpoint in Determined's format; return the new id.

    Code, metadata and resume state stay the same. Meanwhile the whole state is held in main memory. If ``trusted``,
    unpickle anything, and run any code that the files ask for. Raise a ``ValueError`` if the checkpoint is not sharded,
    and a ``CheckpointError`` if reading or writing fails.
    """
    if not layout.is_sharded(directory, layout.find_state_file(directory)):
        raise ValueError(f"{escape(directory)} is not sharded: it is in Determined's format already.")
    content = read_checkpoint(directory, trusted=trusted)
    code_files, _ = split_code(directory, trusted=trusted)
    metadata = layout.read_json(directory / layout.METADATA_FILE)
    metadata.pop(CHECKSUM_KEY, None)
    content.notes = {**metadata, "merged_from": directory.name}
    with tempfile.TemporaryDirectory(prefix="det_lightning-") as folder:
        # Not the directory itself: a file of the code could be taken for the mark of a killed writer there.
        code = pathlib.Path(folder, layout.CODE_DIR)
        code.mkdir()
        for name in code_files:
            copy = code / pathlib.PurePosixPath(name).relative_to(layout.CODE_DIR)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(directory / name, copy)
        # The files were chosen when the sharded checkpoint was written. A .gitignore among them applies no more.
        (code / ".detignore").write_text("!*\n/.detignore\n")
        return storage.write(content, code=CodeCopier(code))
