"""Looks at a run's data from callbacks change nothing of the run, and show what Lightning shows."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from det_lightning import errors, pytorch
from det_lightning.adapters import TrialModule
from tests.adapters.training import Plain
from tests.lightning import pl, trainer
from tests.trials import BATCH_SIZE, SAMPLES, SmallTrial, make_data, seed_everything, weights_of
from tests.warm_python import WarmPython

HOOKS = [
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step"),
    *("on_train_batch_end", "on_train_epoch_end", "on_train_end"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end"),
]


DATA = make_data()


class Noisy(Dataset[Any]):
    """Draws from all global generators for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        inputs, targets = DATA[index]
        return inputs + 0.1 * torch.randn(4) + random.random() + float(np.random.rand()), targets


class InPlace(Sampler[int]):
    """Shuffles its own list, and counts passes."""

    def __init__(self) -> None:
        self.order = [*range(SAMPLES)]
        self.passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        random.shuffle(self.order)
        return iter(self.order[self.passes :] + self.order[: self.passes])


class Lazy(InPlace):
    """Draws each index from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        return (int(self.generator.integers(SAMPLES)) for _ in range(SAMPLES))


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        return (Noisy()[index] for index in torch.randperm(SAMPLES).tolist())


def shuffled(loader: Any = pytorch.DataLoader, **arguments: Any) -> Any:
    return loader(Noisy(), BATCH_SIZE, shuffle=True, **arguments)


def own_generator(loader: Any = pytorch.DataLoader) -> Any:
    return shuffled(loader, generator=torch.Generator().manual_seed(1))


def of_determined(loader: Any) -> Any:
    batches = BatchSampler(range(SAMPLES), BATCH_SIZE, drop_last=False)
    return loader(Noisy(), batch_sampler=pytorch.samplers.ReproducibleShuffleBatchSampler(batches, 7))


class Looking(pl.Callback):
    """Looks at one batch in each of its hooks, and now and then at a whole pass; or at nothing."""

    def __init__(self, hooks: list[str]) -> None:
        self.passes: list[tuple[str, int, int]] = []
        self._looks = 0
        for hook in hooks:
            setattr(self, hook, self._look)

    trainer: pl.Trainer

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.trainer = trainer

    def _look(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        for name in ("train_dataloader", "val_dataloaders"):
            shown = getattr(trainer, name)
            (shown,) = shown.values() if isinstance(shown, dict) else shown if isinstance(shown, list) else [shown]
            if shown is None:  # before Lightning has asked for the data, as with any module
                next(iter(module.train_dataloader()))
                continue
            next(iter(shown))
            self._looks += 1
            if self._looks % 15 < 2:
                self.passes.append((name, sum(len(targets) for _, targets in shown), len(shown)))


def fit(make_loader: Callable[[], Any], hooks: list[str], give: Any = None, **flags: Any) -> tuple[Any, Looking]:
    """Train on loaders of the trial, or on data given to ``fit``; return the weights and all random states."""

    class Trial(SmallTrial):
        def build_training_data_loader(self) -> Any:
            return make_loader() if give is None else super().build_training_data_loader()

        build_validation_data_loader = build_training_data_loader

    looking = Looking(hooks)
    ckpt_path = flags.pop("ckpt_path", None)
    seed_everything(3 if ckpt_path is None else 99)
    module = TrialModule(Trial)
    data = {} if give is None else {"train_dataloaders": give(make_loader()), "val_dataloaders": give(make_loader())}
    trainer([looking], **{"max_epochs": 2, **flags}).fit(module, **data, ckpt_path=ckpt_path)
    of_numpy: Any = np.random.get_state()
    drawn = torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist()
    return (weights_of(module.trial).tolist(), drawn), looking


def own_sampler(sampler: type[InPlace]) -> Any:
    def make(loader: Any = pytorch.DataLoader) -> Any:
        return loader(Noisy(), BATCH_SIZE, sampler=sampler())

    return make


LENGTHS = {("train_dataloader", SAMPLES, 7), ("val_dataloaders", SAMPLES, 7)}


def stream(loader: Any) -> Any:
    return loader(Stream(), BATCH_SIZE)


def alone(loader: Any) -> Any:
    return loader


def in_a_list(loader: Any) -> Any:
    return [loader]


@pytest.mark.parametrize(
    ("make_loader", "give", "flags"),
    [
        (shuffled, None, {}),
        (own_generator, None, {}),
        (of_determined, None, {}),
        (own_sampler(InPlace), None, {}),
        (own_sampler(Lazy), None, {}),
        (shuffled, alone, {}),
        (own_generator, in_a_list, {}),
        (own_sampler(InPlace), alone, {}),
        (stream, alone, {}),
        (stream, in_a_list, {}),
        (own_generator, None, {"limit_train_batches": 3, "limit_val_batches": 2}),
        (own_generator, None, {"overfit_batches": 2}),
        (own_generator, None, {"val_check_interval": 2}),
    ],
)
def test_looks_change_nothing(make_loader: Any, give: Any, flags: dict[str, Any]) -> None:
    """Each look is at a whole pass, whatever the flags."""

    def make() -> Any:
        return make_loader(pytorch.DataLoader if give is None else DataLoader)

    expected, _ = fit(make, [], give, **flags)
    state, looking = fit(make, HOOKS, give, **flags)
    assert state == expected
    assert {*looking.passes} == LENGTHS


@pytest.mark.slow
@pytest.mark.parametrize("give", [None, alone])
def test_looks_leave_workers_alone(give: Any) -> None:
    def persistent() -> Any:
        kind = pytorch.DataLoader if give is None else DataLoader
        return shuffled(kind, num_workers=2, persistent_workers=True)

    expected, _ = fit(persistent, [], give)
    state, looking = fit(persistent, ["on_train_start", "on_train_epoch_end"], give)
    assert state == expected
    assert {*looking.passes} <= LENGTHS


@pytest.mark.parametrize("hooks", [[], HOOKS])
def test_looking_at_the_data_does_not_change_a_resumed_run(hooks: list[str], tmp_path: Path) -> None:
    (whole, *_), _ = fit(own_sampler(Lazy), [])
    _, looking = fit(own_sampler(Lazy), hooks, max_epochs=-1, max_steps=2 * 10)
    looking.trainer.save_checkpoint(tmp_path / "saved.ckpt")
    (resumed, *_), _ = fit(own_sampler(Lazy), hooks, ckpt_path=tmp_path / "saved.ckpt")
    assert resumed == whole


class Keeping(pl.Callback):
    shown: Any = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.shown = trainer.train_dataloader, trainer.val_dataloaders


ATTRIBUTES = (
    *("dataset", "batch_size", "sampler", "num_workers", "collate_fn", "drop_last", "pin_memory", "timeout"),
    *("generator", "prefetch_factor", "persistent_workers", "multiprocessing_context"),
)


def show(module: pl.LightningModule, train: Any, val: Any, **flags: Any) -> tuple[Any, Any]:
    keeping = Keeping()
    trainer([keeping], **flags).fit(module, train, val)
    shown: tuple[Any, Any] = keeping.shown
    return shown


def test_callbacks_see_what_lightning_shows() -> None:
    train = DataLoader(make_data(), BATCH_SIZE, shuffle=True, generator=torch.Generator(), drop_last=True)
    samplers = DataLoader(make_data(), batch_sampler=BatchSampler(RandomSampler(make_data()), BATCH_SIZE, True))
    for val in (train, samplers, [train], {"a": train}):
        plain, ours = show(Plain(), train, val), show(TrialModule(SmallTrial), train, val)
        for expected, shown in zip(plain, ours, strict=True):
            assert type(shown) is type(expected) or isinstance(shown, DataLoader)
            (loader,) = torch.utils._pytree.tree_leaves(expected)
            (view,) = torch.utils._pytree.tree_leaves(shown)
            assert isinstance(view, DataLoader)
            assert len(view) == len(loader)
            assert [getattr(view, name) for name in ATTRIBUTES] == [getattr(loader, name) for name in ATTRIBUTES]


def test_overfit_batches_shows_data_in_order() -> None:
    for module in (Plain(), TrialModule(SmallTrial)):
        shown, _ = show(module, shuffled(DataLoader), shuffled(DataLoader), overfit_batches=2)
        assert (type(shown.sampler), len(shown)) == (SequentialSampler, 7)


def test_passes_differ_and_outlive_the_run() -> None:
    keeping = Keeping()
    trainer([keeping]).fit(TrialModule(SmallTrial))
    first, second = ([targets.tolist() for _, targets in keeping.shown[0]] for _ in range(2))
    assert first != second
    expected = sorted(DATA.tensors[1].tolist())
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == expected


def test_data_can_be_asked_for_before_a_run() -> None:
    module = TrialModule(SmallTrial)
    seed_everything()
    before = torch.get_rng_state()
    loaders = module.train_dataloader(), module.val_dataloader()
    assert [len(loader) for loader in loaders] == [7, 4]
    for loader in loaders:
        assert sum(len(targets) for _, targets in loader) == SAMPLES
    assert torch.equal(torch.get_rng_state(), before)
    assert module.trial is None


def test_data_can_be_asked_for_while_validating() -> None:
    class Asking(pl.Callback):
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
            shown: Any = trainer.val_dataloaders
            self.lengths += [len([*module.val_dataloader()]), len([*shown])]

        def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
            self.lengths.append(len(module.val_dataloader()))

    asking = Asking()
    seed_everything()
    module = TrialModule(SmallTrial)
    expected = trainer().validate(module, DataLoader(make_data(), 25), verbose=False)
    assert trainer([asking]).validate(module, DataLoader(make_data(), 25), verbose=False) == expected
    assert asking.lengths == [4, 2, 2, 2, 2]


# Copies


def through_a_file(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copy_module", [copy.deepcopy, through_a_file])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_copies_go_on_like_the_original(copy_module: Any, precision: Any) -> None:
    seed_everything()
    module = TrialModule(SmallTrial)
    trainer(precision=precision).fit(module)
    copied = copy_module(module)
    ended = []
    for one in (module, copied):
        assert one.models[0] is one.context.models[0] is one.trial.body
        seed_everything()
        trainer(precision=precision).fit(one)
        ended.append(weights_of(one.trial))
    assert torch.equal(ended[0], ended[1])


class Snapshots(pl.Callback):
    def __init__(self) -> None:
        self.taken: list[tuple[Any, torch.Tensor]] = []
        for hook in ("on_before_optimizer_step", "on_train_batch_end", "on_validation_end"):
            setattr(self, hook, self._take)

    def _take(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.taken.append((copy.deepcopy(module), weights_of(module.trial).clone()))


def test_copies_within_a_run_stay_as_they_are() -> None:
    snapshots = Snapshots()
    trainer([snapshots]).fit(TrialModule(SmallTrial))
    assert len(snapshots.taken) > 7
    for module, weights in snapshots.taken:
        assert torch.equal(weights_of(module.trial), weights)
        assert module.driver is None


# A part of another module


class Whole(pl.LightningModule):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def forward(self, inputs: Any) -> Any:
        return self.part(inputs)

    training_step = Plain.training_step
    train_dataloader = Plain.train_dataloader
    trained = 0

    @property
    def model(self) -> Any:
        return self.part

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OneModel(SmallTrial):
    def predict_batch(self, batch: Any) -> Any:
        return self.head(self.body(batch))


@pytest.mark.parametrize("nested", [False, True])
def test_a_built_module_trains_as_a_part(nested: bool) -> None:
    module = TrialModule(OneModel)
    trainer().fit(module)
    plain = copy.deepcopy(torch.nn.Sequential(module.trial.body, module.trial.head))
    ended = []
    for part in (module, plain):
        seed_everything()
        used = trainer()
        used.fit(Whole(torch.nn.Sequential(part) if nested else part))
        assert type(used.fit_loop.epoch_loop).__module__.startswith(pl.__name__)
        ended.append(torch.cat([p.detach().flatten() for p in part.parameters()]))
    assert torch.equal(ended[0], ended[1])


def test_a_part_without_weights_is_refused() -> None:
    with pytest.raises(errors.InvalidExperimentException, match=r"inside Whole has no weights.*load_from_checkpoint"):
        trainer().fit(Whole(TrialModule(SmallTrial)))


Fabric = importlib.import_module("lightning.fabric" if "." in pl.__name__ else "lightning_fabric").Fabric


def test_fabric_predicts_and_refuses_to_train() -> None:
    module = TrialModule(OneModel)
    trainer().fit(module)
    expected = module.eval()(make_data().tensors[0])
    in_fabric = Fabric(accelerator="cpu", devices=1).setup(module)
    assert torch.equal(in_fabric(make_data().tensors[0]), expected)
    with pytest.raises(errors.InternalException, match="not with Fabric"):
        Fabric(accelerator="cpu", devices=1).setup(TrialModule(OneModel)).training_step(iter(()))


RANKS = """
import copy
import itertools
import pytest
from det_lightning.adapters import TrialModule
from tests.adapters.test_shown_data import DATA, Keeping
from tests.lightning import trainer
from tests.trials import SmallTrial, seed_everything

class Looking(Keeping):
    def on_validation_batch_end(self, trainer, module, *rest):  # when the ranks are in different passes
        own = [targets.flatten().tolist() for _, targets in trainer.train_dataloader]
        shares = module.context.distributed.allgather([*itertools.chain(*own)])
        self.all_once = sorted(itertools.chain(*shares)) == sorted(DATA.tensors[1].flatten().tolist())

weights = []
for callback in (Keeping(), Looking()):
    seed_everything()
    module = TrialModule(SmallTrial)
    trainer([callback], max_epochs=2, strategy="trial_ddp", devices=2).fit(module)
    weights.append(module.trial.head.weight.tolist())
with pytest.raises(TypeError, match="trained in 2 processes can be neither copied nor pickled.*load_from_checkpoint"):
    copy.deepcopy(module)
print(f"same {weights[0] == weights[1]}, once {callback.all_once}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_ranks_see_their_shares(warm_python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = warm_python.run(tmp_path / "ranks.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same True, once True") == 2
