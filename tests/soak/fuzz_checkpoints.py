"""Reads many damaged and malicious checkpoints: nothing may run, end the process or raise a foreign error.

Memory and time are what torch promises: the memory is limited, and a reader that takes too long is ended and counted.

python tests/soak/fuzz_checkpoints.py --inputs 20000 --seed 0
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from det_lightning import errors, pytorch
from det_lightning.checkpoint import load_checkpoint, read_checkpoint
from det_lightning.checkpoint.safe_load import inspect_checkpoint, verify_checkpoint
from tests.soak.kill_training import Outcome, run_soak
from tests.soak.mutations import SENTINEL, Files, make_corpus, make_input, write_files

MEMORY_BYTES = 6 << 30
LIMIT_S = 20.0
CHUNK = 500


class PlainTrial(pytorch.PyTorchTrial):
    """A trial that any checkpoint can be loaded into, as far as its class and hyperparameters go."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(2, 3))

    def refuse(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError("loading a trial must not call this")

    build_training_data_loader = build_validation_data_loader = train_batch = refuse


READERS: dict[str, Callable[[Path], Any]] = {
    "read_checkpoint": read_checkpoint,
    "load_checkpoint": load_checkpoint,
    "load_trial": lambda directory: pytorch.load_trial_from_checkpoint_path(directory, trial_class=PlainTrial),
    "verify": verify_checkpoint,
    "inspect": inspect_checkpoint,
}


class Watch:
    """Notes what code does that only reads must not do: run something, or write outside of the work folder."""

    def __init__(self, folder: Path) -> None:
        self.armed = False
        self.seen: list[str] = []
        self._folder = str(folder)
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed or not self._is_forbidden(event, args):
            return
        self.armed = False
        self.seen.append(f"{event} {args!r:.300}" + "".join(traceback.format_stack(limit=6)))
        self.armed = True
        raise PermissionError(f"{event} while reading")

    def _is_forbidden(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode, flags = args
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            writes = writes or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            return bool(writes) and not str(path).startswith(self._folder)
        if event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"):
            return not str(args[0]).startswith(self._folder)
        if event == "socket.gethostname":  # for the name of a file of TensorBoard's
            return False
        if event == "exec":  # importing executes modules too
            return not Path(getattr(args[0], "co_filename", "<string>")).is_absolute()
        return event.startswith(("subprocess.", "socket.", "ctypes.", "pickle.", "webbrowser.")) or event in (
            *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.putenv", "os.spawn", "pty.spawn"),
            *("os.kill", "os.chmod", "os.link", "os.symlink", "code.__new__"),
        )


def read_one(directory: Path, watch: Watch, answers: Counter[str], names: Iterable[str] = READERS) -> list[str]:
    """Let readers read one checkpoint; return what must not have happened."""
    findings = []
    for name in dict.fromkeys(names):
        reader = READERS[name]
        watch.armed = True
        try:
            reader(directory)
            answer = "read"
        except errors.CheckpointError as e:
            answer = type(e).__name__
        except (ValueError, errors.InvalidExperimentException) as e:
            answer = type(e).__name__
            if name != "load_trial":  # which builds the trial: of its class or hyperparameters
                findings.append(f"{name} raised {''.join(traceback.format_exception(e))}")
        except BaseException as e:  # whatever else comes is what is looked for
            answer = f"{type(e).__name__} (foreign)"
            findings.append(f"{name} raised {''.join(traceback.format_exception(e))}")
        finally:
            watch.armed = False
        answers[f"{name}: {answer}"] += 1
    findings += [f"was done: {event}" for event in watch.seen]
    watch.seen.clear()
    if any(Path(place, SENTINEL).exists() for place in (".", directory)):
        findings.append("the sentinel is there")
    return findings


def work(corpus: dict[str, Files], seed: int, numbers: range, folder: Path, results: Any) -> None:
    """Read the inputs of these numbers, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    directory = folder / "storage" / "checkpoint"
    watch = Watch(folder)
    importlib.import_module("torch._subclasses.schema_check_mode")  # as torch does for some tensors
    for files in corpus.values():  # what is imported on first use is imported now
        write_files(directory, files)
        read_one(directory, watch, Counter())
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        results.send(("begin", number))
        kind, files = make_input(corpus, seed, number)
        write_files(directory, files)
        answers: Counter[str] = Counter()
        # All readers share most of their code: one that reads all is enough for many.
        others = [*READERS][1:]
        readers = ["read_checkpoint", others[number % len(others)]]
        findings = read_one(directory, watch, answers, readers)
        results.send(("end", number, kind, answers, findings))
        if number % 50 == 0:
            gc.collect()
    results.send(("done",))


def soak(inputs: int, seed: int, folder: Path, workers: int = 2, keep: Path | None = None, first: int = 0) -> Outcome:
    """Read ``inputs`` checkpoints in processes that may crash; ``keep`` those that something was found with."""
    outcome = Outcome()
    corpus = make_corpus(folder / "corpus")
    context = multiprocessing.get_context("fork")
    waiting = [range(at, min(at + CHUNK, first + inputs)) for at in range(first, first + inputs, CHUNK)]
    running: dict[Any, tuple[Any, range, int, float]] = {}

    def note(number: int, kind: str, what: str) -> None:
        outcome.findings.append(f"input {number} ({kind}): {what}")
        if keep is not None:
            write_files(keep / str(number) / "checkpoint", make_input(corpus, seed, number)[1])

    def give_up(receiver: Any, crash: str | None) -> None:
        process, numbers, number, _ = running.pop(receiver)
        if crash is None:
            outcome.counts["ended after the time limit"] += 1
        else:
            note(number, make_input(corpus, seed, number)[0], crash)
        outcome.counts["inputs"] += 1
        waiting.append(range(number + 1, numbers.stop))
        receiver.close()
        process.join()

    while waiting or running:
        while waiting and len(running) < workers:
            numbers = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            place = folder / f"worker{numbers.start}"
            process = context.Process(target=work, args=(corpus, seed, numbers, place, sender))
            process.start()
            sender.close()
            running[receiver] = process, numbers, numbers.start, time.monotonic()
        ready = multiprocessing.connection.wait(list(running), timeout=0.5)
        for receiver in [one for one in list(running) if one in ready]:
            process, numbers, number, _ = running[receiver]
            try:
                message = receiver.recv()
            except EOFError:
                process.join()
                code = process.exitcode
                give_up(receiver, f"crash: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}")
                continue
            if message[0] == "done":
                del running[receiver]
                process.join()
                shutil.rmtree(folder / f"worker{numbers.start}", ignore_errors=True)
                continue
            running[receiver] = process, numbers, message[1], time.monotonic()
            if message[0] == "end":
                _, number, kind, answers, findings = message
                outcome.counts.update(["inputs", kind])
                outcome.counts.update(answers)
                for what in findings:
                    note(number, kind, what)
        for receiver, (process, _, _, since) in list(running.items()):
            if time.monotonic() - since > LIMIT_S:
                process.kill()
                process.join()
                give_up(receiver, None)
    return outcome


if __name__ == "__main__":
    run_soak(
        "inputs",
        20_000,
        lambda args, folder: soak(args.inputs, args.seed, folder, args.workers, args.keep, args.first),
        first={"type": int, "default": 0, "help": "number of the first input, to see one again"},
        workers={"type": int, "default": os.cpu_count() or 1},
        keep={"type": lambda name: Path(name).resolve(), "help": "directory for the inputs with findings"},
    )
