"""Writes a trial's file as one with a LightningModule, changing only what is specific to Determined."""

from __future__ import annotations

import dataclasses
import keyword
import re

import libcst as cst

from det_lightning.porting.python_files import port_python
from det_lightning.porting.python_syntax import (
    base_names,
    dotted_name,
    is_keyword,
    list_methods,
    list_parameters,
    list_targets,
    parameter_names,
)
from det_lightning.porting.ruff_rules import sort_imports
from det_lightning.porting.to_lightning import hooks, steps
from det_lightning.porting.to_lightning.context_calls import (
    calls_init_of_trial,
    drop_own_hparams,
    rename_members,
    rewrite_context,
)
from det_lightning.porting.to_lightning.leftovers import ADVICE, Imports, mark_leftovers, remove_unused_imports
from det_lightning.porting.to_lightning.module_file import ModuleFile, expand_blocks, list_statements
from det_lightning.porting.to_lightning.trial import Trial

_REQUIRED = ("__init__", "train_batch", "build_training_data_loader", "build_validation_data_loader")
# What newly written code imports.
_NEEDED = {"torch.Generator()": "import torch", "pathlib.Path(self.logger.log_dir)": "import pathlib"}
_HPARAM = re.compile(
    r"""self\.(?:trial_)?hparams(?:\[["'](\w+)["']\]|\.get\(["'](\w+)["']|\.(?!get\b|items\b|keys\b|values\b)(\w+))"""
)


@dataclasses.dataclass(frozen=True)
class Todo:
    """A comment with work for the user."""

    line: int  # the line below the comment in the written file, from 1
    text: str


@dataclasses.dataclass(frozen=True)
class WrittenModule:
    """The file of a trial, rewritten as a LightningModule."""

    text: str
    name: str  # of the class
    todos: list[Todo]
    trainer_arguments: list[str]
    arguments: list[str]  # the class's own arguments without a default
    package: str = "pytorch_lightning"  # the package to import Lightning from

    def program(self, module: str) -> str:
        """Return the source of a training program; ``module`` is the name to import the file by.

        The program has ``...`` for values unknown to the file.
        """
        found = {name for match in _HPARAM.finditer(self.text) for name in match.groups() if name}
        names = [*self.arguments, *sorted(found - {"__getitem__"} - set(self.arguments))]
        # A keyword can be given in a dict only.
        given = ", ".join(f'**{{"{name}": ...}}' if keyword.iskeyword(name) else f"{name}=..." for name in names)
        settings = ", ".join(["max_epochs=...", "num_sanity_val_steps=0", *self.trainer_arguments])
        return (
            f"import {self.package} as pl\nfrom {module} import {self.name}\n\n"
            f"trainer = pl.Trainer({settings})\ntrainer.fit({self.name}({given}))\n"
        )


class NoTrialError(ValueError):
    """The file has no trial to be written as a LightningModule; the message says why."""


def write_module(text: str, aggregated_by: str = "", package: str = "pytorch_lightning") -> WrittenModule:
    """Return the source of a trial, rewritten as a LightningModule.

    All other code of the file stays, except that calls of Determined's ``Trainer`` become comments.

    Args:
        text: the source of the trial's file.
        aggregated_by: the place of an ``aggregation_frequency`` outside of the file, for comments.
        package: the package from which the project imports Lightning.

    Raises:
        NoTrialError: there is no trial to rewrite.
        libcst.ParserSyntaxError: the text is not Python 3.
    """
    file = ModuleFile(expand_blocks(port_python(text.replace("\r\n", "\n"))[0]))
    definition = _find_trial(file)
    imports = Imports(file)
    trial = Trial(file, definition)
    module_name = re.sub(r"Trial$", "", definition.name.value) + "Module"
    for derived in _find_classes(file, definition.name.value):
        file.todo(derived, "this class must override members of a LightningModule instead of members of a trial")
    loaders = {"build_training_data_loader": "train_dataloader", "build_validation_data_loader": "val_dataloader"}
    if "evaluate_full_dataset" in trial.methods:  # val_dataloader() is written anew
        del loaders["build_validation_data_loader"]
    rename_members(trial, {**loaders, definition.name.value: module_name})
    file.replace(definition.name, module_name)
    imports.rewrite_uses()
    rewrite_context(trial)
    drop_own_hparams(trial)
    file.replace_base(definition, "PyTorchTrial", "pl.LightningModule")
    _rewrite_init(trial)
    reducing = hooks.rewrite_reducers(trial)
    _rewrite_methods(trial)
    _mark_settings(trial, aggregated_by)
    hooks.append_hooks(trial, reducing)
    for callback in _find_classes(file, "PyTorchCallback"):
        hooks.rewrite_callback(file, callback)
    imports.needed.add(f"import {package} as pl")
    for expression, statement in _NEEDED.items():
        if expression in file.edits.result():
            imports.needed.add(statement)
    imports.rewrite(_comment_out_what_trains(file, imports))
    return dataclasses.replace(_finish(trial, module_name), package=package)


def _finish(trial: Trial, module_name: str) -> WrittenModule:
    written = trial.file.edits.result()
    try:
        file = ModuleFile(written)
    except cst.ParserSyntaxError as e:
        line = [*written.splitlines(), ""][e.raw_line - 1].strip()
        raise NoTrialError(f"its form cannot be rewritten, near: {line}") from e
    mark_leftovers(file, trial, module_name)
    remove_unused_imports(file, trial.file.text)
    text = sort_imports(file.edits.result())
    given = list_parameters(trial.methods["__init__"])[2:]
    own = [parameter.name.value for parameter in given if parameter.default is None]
    settings = ['logger=pl.loggers.TensorBoardLogger("runs")'] if "self.logger" in text else []
    settings += ['precision="16-mixed"'] if trial.uses_amp() else []
    todos = _find_todos(text, [*trial.file.todos, *file.todos])
    return WrittenModule(text, module_name, todos, settings, own)


def _find_todos(text: str, texts: list[str]) -> list[Todo]:
    """Return the comments with ``texts``, and their lines in a written file."""
    found: list[Todo] = []
    waiting: list[str] = []
    comments = {f"# TODO: {todo}": todo for todo in texts}
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if line.strip() in comments:
            waiting.append(comments[line.strip()])
        else:
            found += [Todo(number, todo) for todo in waiting]
            waiting = []
    return found


def _mark_settings(trial: Trial, aggregated_by: str) -> None:
    """Mark what differs in the module: aggregation over batches, and the loader's workers."""
    by = aggregated_by or ("this file" if "aggregation_frequency" in trial.file.text else "")
    for call in trial.context_calls("step_optimizer") if by else ():
        advice = "divide the gradients by that number of batches, step and zero on every such batch only"
        trial.file.todo(call, f"{by} sets an aggregation_frequency: {advice}")
    method = trial.methods.get("build_training_data_loader")
    for given in [] if method is None else trial.file.find(cst.Arg, within=method):
        if is_keyword(given, "num_workers") and trial.file.source(given.value) != "0":
            trial.file.todo(given, "from the second epoch on, workers draw other random numbers than with Determined")


def _find_classes(file: ModuleFile, base: str) -> list[cst.ClassDef]:
    return [node for node in file.find(cst.ClassDef) if base in base_names(node)]


def _find_trial(file: ModuleFile) -> cst.ClassDef:
    trials = _find_classes(file, "PyTorchTrial")
    if len(trials) != 1:
        names = ", ".join(trial.name.value for trial in trials) or "none"
        raise NoTrialError(f"exactly one class must derive from PyTorchTrial; found: {names}")
    (trial,) = trials
    defined = {method.name.value for method in list_methods(trial)}
    for statement in list_statements(trial.body):
        if isinstance(statement, cst.Assign):
            defined.update({dotted_name(target) for target in list_targets(statement)} - {"__init__"})
    missing = [method for method in _REQUIRED if method not in defined]
    if {"evaluate_batch", "evaluate_full_dataset"}.isdisjoint(defined):
        missing.append("evaluate_batch")
    if "build_model" in defined and "optimizer" in defined:
        raise NoTrialError(
            f"{trial.name.value} has the interface before Determined 0.12.13 (build_model, optimizer); wrap model and "
            "optimizer in __init__ and call context.backward() and context.step_optimizer() in train_batch first"
        )
    if missing:
        raise NoTrialError(f"{trial.name.value} does not define {', '.join(missing)}")
    return trial


def _rewrite_init(trial: Trial) -> None:
    file = trial.file
    init = trial.methods["__init__"]
    for call in file.find(cst.Call, within=init):
        if calls_init_of_trial(call) and isinstance(file.parent(call), cst.Expr):
            file.replace_statement(file.statement(call), [])
    own = "hparams" in parameter_names(init)[2:]
    written = _parameters(file, init)
    if not own and init.params.star_kwarg is None:
        written.append("**hparams")
    returns = " -> None" if init.returns is not None else ""
    file.replace_signature(init, f"def __init__({', '.join(written)}){returns}")
    saved = "hparams" if own else ""
    lines = ["super().__init__()", f"self.save_hyperparameters({saved})", "self.automatic_optimization = False"]
    file.insert_in_body(init, lines)


def _parameters(file: ModuleFile, function: cst.FunctionDef) -> list[str]:
    """Return the text of all parameters but the context."""

    def texts(*parameters: cst.Param) -> list[str]:
        return [file.edits.render(file.span(given.name)[0], file.find_end(given)) for given in parameters]

    given = function.params
    star = ["*"] if given.kwonly_params else []
    if isinstance(given.star_arg, cst.Param):
        star = [f"*{text}" for text in texts(given.star_arg)]
    rest = [] if given.star_kwarg is None else [f"**{text}" for text in texts(given.star_kwarg)]
    return ["self", *texts(*list_parameters(function)[2:]), *star, *texts(*given.kwonly_params), *rest]


def _rewrite_methods(trial: Trial) -> None:
    methods = trial.methods
    steps.rewrite_steps(trial)
    if "build_callbacks" in methods:
        hooks.rewrite_build_callbacks(trial.file, methods["build_callbacks"])
    if "get_batch_length" in methods:
        trial.file.replace_statement(methods["get_batch_length"], [])


def _comment_out_what_trains(file: ModuleFile, imports: Imports) -> set[str]:
    """Turn statements with Determined's trainer into comments; return the names still in use."""
    remaining: set[str] = set()
    gone: set[str] = set()
    for statement in list_statements(file.module):
        if isinstance(statement, cst.Import | cst.ImportFrom):
            continue
        left = imports.left_uses(statement)
        if isinstance(statement, cst.ClassDef):
            remaining.update(use.node.value for use in left)
            for use in left:
                unknown = f"nothing replaces {dotted_name(use.expression)}"
                file.todo(use.node, ADVICE.get(use.path.rpartition(".")[2], unknown))
        elif left or any(name.value in gone for name in file.names(within=statement)):
            if isinstance(statement, cst.FunctionDef):
                gone.add(statement.name.value)
            elif isinstance(statement, cst.Assign):
                gone.update(dotted_name(target) for target in list_targets(statement))
            file.todo(statement, "pl.Trainer(max_epochs=...).fit(module) replaces this")
            lines = file.render(statement).splitlines()
            file.replace(statement, "\n".join(f"# {line}".rstrip() for line in lines))
    return remaining
