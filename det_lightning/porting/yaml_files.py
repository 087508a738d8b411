"""Ports experiment configurations, conda environments and other YAML, keeping comments and layout."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from det_lightning.config import field_effects, read_config
from det_lightning.config.yaml_reader import compose_documents
from det_lightning.errors import ConfigError
from det_lightning.porting.commands import (
    RUN_AN_EXPERIMENT,
    find_trial_class,
    launcher_counterpart,
    missing_launcher,
    port_shell,
    runs_a_class,
)
from det_lightning.porting.counterparts import package_finding
from det_lightning.porting.edits import Edits
from det_lightning.porting.findings import Finding, Severity
from det_lightning.porting.requirements import note_packages, port_requirement

# An image or a name of a service of the cluster, or a template of Helm.
_OF_CLUSTER = re.compile(r"\bdetermined[-_](?:master|agent|db)\b|/etc/determined/")
_OF_HELM = re.compile(r"\{\{[^}\n]*\.(?:Values|Release|Chart|Capabilities)\b|\{\{-?\s*(?:include|template|define)\s+\"")
_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
# An experiment, or jobs for continuous integration: either may name a cluster.
_FOR_A_CLUSTER = re.compile(r"^(?:searcher|hyperparameters|jobs|on|stages|steps)[ \t]*:", re.MULTILINE)
_MODULE = re.compile(r"determined\.launch\.(\w+)")
_SEVERITIES: dict[str, Severity] = {"ignored": Severity.note, "warned": Severity.check}


def port_yaml(text: str) -> tuple[str, list[Finding]]:
    """Return YAML with launch layers and packages rewritten, and findings for the rest.

    Files for a Determined cluster stay; Helm's templates are not even YAML.
    """
    code = _COMMENT.sub("", text)
    if _OF_HELM.search(text) or (_OF_CLUSTER.search(code) and not _FOR_A_CLUSTER.search(code)):
        reason = "a file for a Determined cluster, not for training code"
        note = Finding(0, Severity.note, reason, "keep the file for as long as there is a cluster")
        return text, [note] if re.search("determined|DET_", text) else []
    port = _YamlPort(text)
    documents = compose_documents(text)
    for document in documents:
        port.visit(document)
        port.check_document(_entries(document))
    if len(documents) == 1:
        port.check_configuration(_entries(documents[0]))
    return port.edits.result(), port.findings


class _YamlPort:
    def __init__(self, text: str) -> None:
        self.edits = Edits(text)
        self.findings: list[Finding] = []
        self._seen: set[int] = set()

    def visit(self, node: Node) -> None:
        """Port the scalars of a node, each only once even if aliases repeat it."""
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if isinstance(node, MappingNode):
            for pair in node.value:
                for part in pair:
                    self.visit(part)
        elif isinstance(node, SequenceNode):
            self._visit_words(node)
            for item in node.value:
                self.visit(item)
        else:
            text = self.edits.text[node.start_mark.index : node.end_mark.index]
            ported, findings = port_shell(text, _line(node)) if "det" in text or "DET_" in text else (text, [])
            self.findings += findings
            if ported != text:
                self._replace(node, ported)

    def _replace(self, node: Node, new: str) -> None:
        self.edits.replace(node.start_mark.index, node.end_mark.index, new)

    def _visit_words(self, node: SequenceNode) -> None:
        """Port a command given as a list of words."""
        for before, word in zip(node.value, node.value[1:], strict=False):
            found = _MODULE.fullmatch(word.value) if isinstance(word, ScalarNode) else None
            if before.value == "-m" and found:
                self._seen.add(id(word))
                if words := launcher_counterpart(found.group(1)):
                    before_word = self.edits.text[self.edits.offset(_line(word), 0) : word.start_mark.index]
                    separator = ", " if node.flow_style else self.edits.newline() + before_word
                    self._replace(word, separator.join(_quote(new, word) for new in words))
                else:
                    self.findings.append(missing_launcher(found.group(1), _line(word)))
        scalars = [word for word in node.value if isinstance(word, ScalarNode)]
        if trial := find_trial_class([word.value for word in scalars]):
            self.findings.append(runs_a_class(trial, next(_line(word) for word in scalars if trial in word.value)))

    # Kinds of documents

    def check_document(self, entries: dict[str, Node]) -> None:
        """Port the packages of a conda environment, and note unportable packages."""
        for item in _items(entries.get("dependencies")):
            if isinstance(item, ScalarNode) and port_requirement(item.value.replace(" ", "")) is not None:
                reason = "conda has no package of det-lightning"
                self._note(item, Severity.problem, reason, "require det-lightning in the list of pip")
            for package in _items(_entries(item).get("pip")):
                if not isinstance(package, ScalarNode):
                    continue
                self.findings += note_packages(package.value, _line(package))
                if (ported := port_requirement(package.value)) is not None:
                    self._replace(package, _quote(ported, package))

    def check_configuration(self, entries: dict[str, Node]) -> None:
        """Note the fields of an experiment configuration with little or no effect under ``det-lightning run``."""
        entrypoint = entries.get("entrypoint")
        if "searcher" in entries and entries.keys() & {"entrypoint", "hyperparameters"}:
            self.findings += _findings_of_run(self.edits.text, partial=entrypoint is None)
            # In the ported text, because the new launcher may have other options.
            trial = None
            with contextlib.suppress(ConfigError):
                trial = read_config(f"{self.edits.result()}\n", partial=True).trial_class
            if trial is not None and entrypoint is not None:
                # In an entrypoint, a launcher may run a class.
                lines = range(_line(entrypoint), entrypoint.end_mark.line + 2)
                self.findings = [f for f in self.findings if f.line not in lines or f.advice != RUN_AN_EXPERIMENT]
                finding = package_finding(trial.partition(":")[0], _line(entrypoint))
                if finding is not None and finding.severity is Severity.problem:  # not covered
                    self.findings.append(finding)
        precision = _entries(entries.get("optimizations")).get("mixed_precision")
        if precision is not None and precision.value != "O0":
            reason = f"optimizations.mixed_precision: {precision.value} was removed in Determined 0.13"
            advice = (
                f'call context.configure_apex_amp(models, optimizers, opt_level="{precision.value}") or '
                "context.experimental.use_amp() in the trial; a trial with build_model() needs no change"
            )
            self._note(precision, Severity.check, reason, advice)

    def _note(self, node: Node, severity: Severity, reason: str, advice: str) -> None:
        self.findings.append(Finding(_line(node), severity, reason, advice))


# What ``det-lightning run`` does with the fields of an experiment configuration


def _findings_of_run(text: str, *, partial: bool) -> list[Finding]:
    """Return a finding for each refused, missing, ignored or differently read field of a configuration."""
    try:
        config = read_config(f"{text}\n", partial=partial)
    except ConfigError as e:
        advice = "change it: det-lightning run refuses the file"
        mistakes = [(m.line or 0, ": ".join(part for part in (m.path, m.message) if part)) for m in e.mistakes]
        return [Finding(line, Severity.problem, reason, advice) for line, reason in mistakes]
    advice = "leave the field; det-lightning run prints this note"
    findings = [Finding(n.line or 0, Severity.note, f"{n.path}: {n.message}", advice) for n in config.notes]
    images = config.environment.image
    # A trial needs only torch of Determined's environments.
    is_of_determined = all("determinedai/" in name for name in (images.cpu, images.cuda, images.rocm) if name)
    for field in field_effects(config):
        is_mount = field.path.startswith("bind_mounts")  # nothing in the file can be changed
        severity = Severity.note if is_mount else _SEVERITIES.get(field.effect)
        advice = field.note.rstrip(".")
        if field.path == "optimizations.mixed_precision":  # check_configuration() has advice of its own
            continue
        if field.path == "environment.image" and not is_of_determined:
            severity = Severity.check
            advice = "before the run, install the needed packages of the image in a virtual environment"
        if severity is not None:
            reason = f"{field.path} has no effect under det-lightning run"
            findings.append(Finding(field.line or 0, severity, reason, advice))
    return findings


# Nodes


def _line(node: Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _quote(text: str, like: Node) -> str:
    quote = like.style if isinstance(like, ScalarNode) and like.style in ("'", '"') else ""
    return f"{quote}{text}{quote}"


def _items(node: Any) -> list[Node]:
    return node.value if isinstance(node, SequenceNode) else []


def _entries(node: Any) -> dict[str, Node]:
    return {str(key.value): value for key, value in node.value} if isinstance(node, MappingNode) else {}
