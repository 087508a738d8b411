"""Experiment configurations, conda environments and other YAML, changed in place: comments and layout stay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from det_lightning.porting.commands import launcher_counterpart, port_shell, runs_a_class, trial_class_in
from det_lightning.porting.edits import Edits
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.missing_parts import missing_launcher
from det_lightning.porting.requirements import port_requirement

_MODULE = re.compile(r"determined\.launch\.(\w+)")
_TRIAL_CLASS = re.compile(r"[\w.]+:[\w.]+")
_SEARCHERS = {"single", "random", "grid", "adaptive_asha"}
_OLD_SEARCHERS = {
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "async_halving": "adaptive_asha",
    "sync_halving": "adaptive_asha",
}


def port_yaml(text: str) -> tuple[str, list[Finding]]:
    """Return YAML with launch layers and packages rewritten, and what could not be.

    Raises:
        yaml.YAMLError: ``text`` is not YAML.
    """
    port = _YamlPort(text)
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        if document is not None:
            port.visit(document)
            port.check_document(document)
    return port.edits.result(), port.findings


class _YamlPort:
    def __init__(self, text: str) -> None:
        self.edits = Edits(text)
        self.findings: list[Finding] = []
        self._seen: set[int] = set()

    def visit(self, node: yaml.Node) -> None:
        """Port the scalars of a node; an anchored one, which aliases bring again, once."""
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self.visit(key)
                self.visit(value)
        elif isinstance(node, yaml.SequenceNode):
            self._visit_words(node)
            for item in node.value:
                self.visit(item)
        else:
            self._visit_scalar(node)

    def _visit_scalar(self, node: yaml.Node) -> None:
        start = node.start_mark.index
        end = node.end_mark.index
        text = self.edits.text[start:end]
        if "det" in text:
            ported, findings = port_shell(text, node.start_mark.line + 1)
            self.findings += findings
            if ported != text:
                self.edits.replace(start, end, ported)

    def _visit_words(self, node: yaml.SequenceNode) -> None:
        """Port a command that is given as a list of words."""
        for before, word in zip(node.value, node.value[1:], strict=False):
            found = _MODULE.fullmatch(word.value) if isinstance(word, yaml.ScalarNode) else None
            if before.value == "-m" and found:
                self._seen.add(id(word))
                words = launcher_counterpart(found.group(1))
                if words is None:
                    self.findings.append(missing_launcher(found.group(1), word.start_mark.line + 1))
                else:
                    self._write_words(node, word, words)
        scalars = [word for word in node.value if isinstance(word, yaml.ScalarNode)]
        trial = trial_class_in([word.value for word in scalars])
        if trial is not None:
            line = next(word.start_mark.line + 1 for word in scalars if trial in word.value)
            self.findings.append(runs_a_class(trial, line))

    def _write_words(self, node: yaml.SequenceNode, word: yaml.ScalarNode, words: tuple[str, ...]) -> None:
        start = word.start_mark.index
        end = word.end_mark.index
        quote = word.style if word.style in ("'", '"') else ""
        separator = ", "
        if not node.flow_style:
            line_start = self.edits.offset(word.start_mark.line + 1, 0)
            separator = self.edits.newline() + self.edits.text[line_start:start]
        self.edits.replace(start, end, separator.join(f"{quote}{word}{quote}" for word in words))

    # What the document is

    def check_document(self, document: yaml.Node) -> None:
        """Note what cannot stay in an experiment configuration, and port the packages of a conda environment."""
        entries = dict(_entries(document))
        dependencies = entries.get("dependencies")
        if isinstance(dependencies, yaml.SequenceNode):
            self._port_conda(dependencies)
        if "entrypoint" in entries or {"searcher", "hyperparameters"} <= entries.keys():
            self._check_experiment(entries)

    def _port_conda(self, dependencies: yaml.SequenceNode) -> None:
        for item in dependencies.value:
            if isinstance(item, yaml.ScalarNode) and port_requirement(item.value.replace(" ", "")) is not None:
                reason = "conda has no package of det-lightning"
                self._note(item, Severity.problem, reason, "require det-lightning in the list of pip")
            for name, packages in _entries(item):
                if name == "pip" and isinstance(packages, yaml.SequenceNode):
                    self._port_packages(packages)

    def _port_packages(self, packages: yaml.SequenceNode) -> None:
        for package in packages.value:
            ported = port_requirement(package.value) if isinstance(package, yaml.ScalarNode) else None
            if ported is not None:
                start = package.start_mark.index
                end = package.end_mark.index
                quote = package.style if package.style in ("'", '"') else ""
                self.edits.replace(start, end, f"{quote}{ported}{quote}")

    def _check_experiment(self, entries: dict[str, yaml.Node]) -> None:
        entrypoint = entries.get("entrypoint")
        if isinstance(entrypoint, yaml.ScalarNode) and _TRIAL_CLASS.fullmatch(entrypoint.value):
            reason = f"entrypoint: {entrypoint.value} names a class, which Determined's agents run"
            advice = "fit it with pl.Trainer and TrialModule, or write a script with init() and Trainer"
            self._note(entrypoint, Severity.note, reason, advice)
        searcher = dict(_entries(entries.get("searcher")))
        self._check_searcher(searcher.get("name"))
        steps = searcher.get("max_steps")
        if steps is not None:
            reason = f"searcher.max_steps: {steps.value} counts steps, as Determined 0.12 did"
            advice = "write max_length: {batches: ...}; a step was 100 batches, or what batches_per_step said"
            self._note(steps, Severity.check, reason, advice)
        precision = dict(_entries(entries.get("optimizations"))).get("mixed_precision")
        if precision is not None and precision.value != "O0":
            reason = f"optimizations.mixed_precision: {precision.value} went with Determined 0.13"
            advice = (
                f'call context.configure_apex_amp(models, optimizers, opt_level="{precision.value}") or '
                "context.experimental.use_amp() in the trial; for one with build_model() nothing has to be done"
            )
            self._note(precision, Severity.check, reason, advice)

    def _check_searcher(self, name: yaml.Node | None) -> None:
        if name is None or name.value in _SEARCHERS:
            return
        new = _OLD_SEARCHERS.get(name.value)
        advice = f"use {new}" if new else f"use one of {', '.join(sorted(_SEARCHERS))}"
        self._note(name, Severity.problem, f"searcher.name: {name.value} is not a searcher of Determined 0.38", advice)

    def _note(self, node: yaml.Node, severity: Severity, reason: str, advice: str) -> None:
        self.findings.append(Finding(node.start_mark.line + 1, severity, reason, advice))


def _entries(node: Any) -> Iterator[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), value
