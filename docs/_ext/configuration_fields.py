"""The directive ``configuration-fields``: the fields of a section of the experiment configuration, from its models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from det_lightning.config.effects import FIELD_RULES, FieldRule, rule_for
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.searchers import SEARCHERS
from det_lightning.config.storage import STORAGES

#: Sections that are a choice between several models, by the value of one of their fields.
CHOICES: dict[str, dict[str, type[BaseModel]]] = {"searcher": {**SEARCHERS}, "checkpoint_storage": {**STORAGES}}
# What the JSON schema does not know: its own rule reads the value, or the default is made when a file is read.
TYPES = {
    "hyperparameters": "mapping of values, ranges and groups",
    "max_length": "{batches: N}, {epochs: N}, {records: N}, or N for a command",
    "min_validation_period": "{batches: N}, {epochs: N} or {records: N}",
    "min_checkpoint_period": "{batches: N}, {epochs: N} or {records: N}",
}
DEFAULTS = {
    "experiment_seed": "the time in seconds",
    "environment_variables": "none",
    "image": "none",
    "log_policies": "two that label CUDA OOM and ECC errors",
    "min_validation_period": "{batches: 0}, which is never",
    "min_checkpoint_period": "{batches: 0}, which is never",
}
KINDS = {
    "string": "string",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
}
BOUNDS = {
    "ge": "at least",
    "minimum": "at least",
    "gt": "greater than",
    "exclusiveMinimum": "greater than",
    "le": "at most",
    "maximum": "at most",
    "lt": "less than",
    "exclusiveMaximum": "less than",
}
EFFECTS = {
    "used": "**Used.**",
    "ignored": "**Ignored.**",
    "warned": "**Ignored, with a warning.**",
    "refused": "**Refused.**",
}


class ConfigurationFields(SphinxDirective):
    """Show the fields of a section; without an argument those of the whole that are not sections."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the documentation."""
        return self.parse_text_to_nodes("\n".join(lines_of(self.arguments[0] if self.arguments else "")))


def is_section(name: str) -> bool:
    """Say whether a field of the configuration has fields of its own."""
    return isinstance(ExperimentConfig.model_fields[name].get_default(call_default_factory=True), BaseModel)


def schemas_of(section: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each model of a section, by the value that selects it; '' where there is no choice."""
    if not section:
        whole = ExperimentConfig.model_json_schema()["properties"]
        return {"": {name: schema for name, schema in whole.items() if not is_section(name)}}
    default = ExperimentConfig.model_fields[section].get_default(call_default_factory=True)
    models = CHOICES.get(section, {"": type(default)})
    return {choice: model.model_json_schema()["properties"] for choice, model in models.items()}


def lines_of(section: str) -> Iterator[str]:
    """Yield the reStructuredText for a section."""
    schemas = schemas_of(section)
    for name in dict.fromkeys(name for schema in schemas.values() for name in schema):
        having = {choice: schema[name] for choice, schema in schemas.items() if name in schema}
        path = f"{section}.{name}" if section else name
        yield from lines_of_field(path, having, list(having) if len(having) < len(schemas) else [])


def lines_of_field(path: str, having: dict[str, dict[str, Any]], choices: list[str]) -> Iterator[str]:
    """Yield the reStructuredText for a field, which the models of ``choices`` have; with none, all."""
    name = path.rpartition(".")[2]
    constants = [schema["const"] for schema in having.values() if "const" in schema]
    schema = next(iter(having.values()))
    yield f".. confval:: {path}"
    yield f"   :type: {TYPES.get(name) or ' or '.join(constants) or type_text(schema)}"
    if not constants and (default := DEFAULTS.get(name) or default_text(schema)):
        yield f"   :default: {default}"
    yield ""
    if choices:
        yield f"   Of ``{'``, ``'.join(choices)}``."
    for line in effect_lines(rule_for(tuple(path.split(".")))):
        yield f"   {line}"
    for rule in FIELD_RULES:
        if rule.field.startswith(f"{path}: "):
            yield f"   ``{rule.field.partition(': ')[2]}``: {' '.join(effect_lines(rule))}"
    yield ""


def effect_lines(rule: FieldRule) -> Iterator[str]:
    """Yield what a field does."""
    note = rule.note.replace("`", "``")
    yield f"{EFFECTS[rule.effect]} {note}"
    if rule.in_calls is not None:
        yield f"In calls: {rule.in_calls}."


def type_text(schema: dict[str, Any]) -> str:
    """Return the type of a value, in words."""
    if "anyOf" in schema:
        return " or ".join(type_text(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if schema.get("type") == "array":
        inner = type_text(schema["items"])
        return f"list of {inner}s" if inner in ("string", "mapping", "integer") else f"list, each {inner}"
    bounds = [f"{text} {schema[bound]}" for bound, text in BOUNDS.items() if bound in schema]
    return ", ".join([KINDS[schema.get("type", "object")], *bounds])


def default_text(schema: dict[str, Any]) -> str:
    """Return the default as a configuration has it; '' for none."""
    default = schema.get("default")
    return "" if default in (None, "") else json.dumps(default).replace('"', "")


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("configuration-fields", ConfigurationFields)
    return {"parallel_read_safe": True}
