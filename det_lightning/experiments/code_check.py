"""Checks an experiment's code without running it: the trial's class, the searcher's metric.

Only what is certain is reported; the rest shows when the trial runs.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from det_lightning.arguments import suggest
from det_lightning.config import ExperimentConfig
from det_lightning.errors import ConfigError
from det_lightning.importing import split_spec
from det_lightning.startup_hook import STARTUP_HOOK

_EVALUATIONS = ("evaluate_batch", "evaluate_full_dataset")
# With one of these, a trial may report further metrics.
_MORE_METRICS = {"build_callbacks", "wrap_reducer"}
_MAKE_NAMES = ("exec", "globals", "locals", "setattr", "vars")


def check_code(config: ExperimentConfig, code: Path, name: str) -> None:
    """Raise a ConfigError if ``code`` lacks the trial class of a configuration, or the class its metric.

    ``name`` is the configuration's, for the message.
    """
    mistake = _find_mistake(config, code)
    if mistake is not None:
        path, message = mistake
        raise ConfigError(name, [config.mistake(path, message)])


def _find_mistake(config: ExperimentConfig, code: Path) -> tuple[tuple[str, ...], str] | None:
    if config.trial_class is None:
        message = _describe_word(config.entrypoint, code)
        return None if message is None else (("entrypoint",), message)
    if not isinstance(config.entrypoint, str) or set("&;|=$") & set(config.entrypoint):
        return None  # such a command may run anywhere, as after `cd`
    variables = str(config.environment.environment_variables)
    if "PYTHONPATH" in variables or (code / STARTUP_HOOK).exists():  # there may be modules elsewhere
        return None
    module, name = split_spec(config.trial_class)
    place = code.joinpath(*module.split("."))
    file = next((file for file in (place / "__init__.py", Path(f"{place}.py")) if file.is_file()), None)
    if file is None:
        top = module.partition(".")[0]
        if place.is_dir() or _is_installed(top):
            return None
        here = [".".join(one.relative_to(code).with_suffix("").parts) for one in code.glob("**/*.py")]
        advice = "`det-lightning run CONFIG DIR` names the directory with the code"
        return ("entrypoint",), f"there is no module {module} in {code.resolve()} ({advice}){suggest(module, here)}"
    where = file.relative_to(code)
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as e:
        return ("entrypoint",), f"{where}:{e.lineno} is not Python: {e.msg}: {(e.text or '').strip()}"
    names = set(_find_names(tree))
    first, _, inner = name.partition(".")
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    if first not in names and not names & {"*", "__getattr__"}:
        return ("entrypoint",), f"there is no {first} in {where}{suggest(first, classes)}"
    metric = config.searcher.metric
    evaluation, metrics = _find_metrics(classes[first]) if first in classes and not inner else (None, None)
    if evaluation is None or not metrics or metric in metrics:
        return None
    called = f"{evaluation.name}() at {where}:{evaluation.lineno}"
    return ("searcher", "metric"), f"{called} does not return {metric}{suggest(metric, metrics)}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # as of __main__
        return True


def _describe_word(entrypoint: object, code: Path) -> str | None:
    """Return a message for an entrypoint that names a Python module or file in place of a class or a command."""
    if not isinstance(entrypoint, str) or entrypoint.split() != [entrypoint] or shutil.which(entrypoint) is not None:
        return None
    if os.access(code / entrypoint, os.X_OK):
        return None
    file = Path(f"{entrypoint.removesuffix('.py')}.py")
    if not (code / file).is_file():
        return None
    classes = re.findall(r"(?m)^class (\w+)\(.*Trial\b", (code / file).read_text(encoding="utf-8", errors="replace"))
    meant = f"{'.'.join(file.with_suffix('').parts)}:{classes[0] if classes else 'Class'}"
    return f"{entrypoint} is not a command; did you mean {meant}? For a script write python3 {file}"


def _find_metrics(trial: ast.ClassDef) -> tuple[ast.FunctionDef | None, set[str] | None]:
    """Return the evaluation method of a class and the metrics that it returns; None if the source does not name all."""
    methods = {one.name: one for one in trial.body if isinstance(one, ast.FunctionDef)}
    attributes = {node.attr for node in ast.walk(trial) if isinstance(node, ast.Attribute)}
    evaluations = [methods[name] for name in _EVALUATIONS if name in methods and not methods[name].decorator_list]
    is_whole = [ast.unparse(base).rpartition(".")[2] for base in trial.bases] == ["PyTorchTrial"]
    is_whole = is_whole and not trial.decorator_list and not any(map(_passes_context_on, ast.walk(trial)))
    if len(evaluations) != 1 or not is_whole or _MORE_METRICS & {*attributes, *methods}:
        return None, None
    returned = [node.value for node in ast.walk(evaluations[0]) if isinstance(node, ast.Return)]
    keys = [key for value in returned for key in (value.keys if isinstance(value, ast.Dict) else [None])]
    names = {key.value if isinstance(key, ast.Constant) else None for key in keys}
    return evaluations[0], None if None in names else {str(name) for name in names}


def _passes_context_on(node: ast.AST) -> bool:
    """Return whether a call, other than ``super().__init__``, gets the context, on which it may register reducers."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) == "super().__init__":
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(ast.unparse(one) in ("context", "self.context") for one in given)


def _find_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name that anything in a module assigns, defines or imports; ``*`` if there may be others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in _MAKE_NAMES):
            yield node.id if isinstance(node.ctx, ast.Store) else "*"
