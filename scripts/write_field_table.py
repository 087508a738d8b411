"""Write the tables of the configuration's fields into docs/reference/configuration.md; with --check, only compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from det_lightning.config.effects import FIELD_RULES, FieldRule, rule_for
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.searchers import SEARCHERS
from det_lightning.config.storage import STORAGES

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"
BEGIN = "<!-- fields: written by scripts/write_field_table.py -->\n"
END = "<!-- end of fields -->\n"
#: Sections that are a choice between several models, by the value of one of their fields.
CHOICES: dict[str, dict[str, type[BaseModel]]] = {"searcher": {**SEARCHERS}, "checkpoint_storage": {**STORAGES}}
# What the JSON schema does not know: a rule of its own reads the value, or the default is made when a file is read.
TYPES = {
    "hyperparameters": "mapping of values, ranges and groups",
    "max_length": "`{batches: N}`, `{epochs: N}`, `{records: N}`, or `N` for a command",
    "min_validation_period": "`{batches: N}`, `{epochs: N}` or `{records: N}`",
    "min_checkpoint_period": "`{batches: N}`, `{epochs: N}` or `{records: N}`",
}
DEFAULTS = {
    "experiment_seed": "the time in seconds",
    "environment_variables": "",
    "image": "",
    "log_policies": "two that label CUDA OOM and ECC errors",
    "min_validation_period": "`{batches: 0}`",
    "min_checkpoint_period": "`{batches: 0}`",
}
KINDS = {
    "string": "string",
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "array": "list",
    "object": "mapping",
}
BOUNDS = {
    "ge": "≥",
    "minimum": "≥",
    "gt": ">",
    "exclusiveMinimum": ">",
    "le": "≤",
    "maximum": "≤",
    "lt": "<",
    "exclusiveMaximum": "<",
}


def is_section(name: str) -> bool:
    """Say whether a field of the configuration has fields of its own."""
    return isinstance(ExperimentConfig.model_fields[name].get_default(call_default_factory=True), BaseModel)


def read_schemas(section: str) -> dict[str, dict[str, Any]]:
    """Return the fields of a section's models, by the value that selects a model; '' where there is no choice."""
    default = ExperimentConfig.model_fields[section].get_default(call_default_factory=True)
    models = CHOICES.get(section, {"": type(default)})
    return {choice: model.model_json_schema()["properties"] for choice, model in models.items()}


def list_fields() -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield each field, the choices of its section that have the field (none if all have), and its JSON schema."""
    whole = ExperimentConfig.model_json_schema()["properties"]
    for name, schema in whole.items():
        if not is_section(name):
            yield name, [], schema
            continue
        models = read_schemas(name)
        for inner in dict.fromkeys(field for fields in models.values() for field in fields):
            having = {choice: fields[inner] for choice, fields in models.items() if inner in fields}
            (found, *_) = having.values()
            if "const" in found:
                found = {"enum": list(having)}
            yield f"{name}.{inner}", list(having) if len(having) < len(models) else [], found


def describe_type(schema: dict[str, Any]) -> str:
    """Return the type of a value, in words."""
    if "anyOf" in schema:
        return " or ".join(describe_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        inner = describe_type(schema["items"])
        return f"list of {inner}s" if inner in ("string", "mapping", "integer") else f"list, each {inner}"
    bounds = [f"{text} {schema[bound]}" for bound, text in BOUNDS.items() if abs(schema.get(bound, 2**63)) < 2**63]
    return f"{KINDS[schema.get('type', 'object')]} {', '.join(bounds)}".rstrip()


def describe_default(schema: dict[str, Any]) -> str:
    """Return the default as a configuration has it; '' for none."""
    default = schema.get("default")
    return "" if default in (None, "") else f"`{json.dumps(default)}`".replace('"', "")


def list_cells() -> Iterator[tuple[str, FieldRule, tuple[str, ...]]]:
    """Yield each field and each value with a rule of its own: the name, the rule and the further cells of the row."""
    for path, choices, schema in list_fields():
        name = path.rpartition(".")[2]
        kind = TYPES.get(name) or describe_type(schema)
        default = DEFAULTS[name] if name in DEFAULTS else describe_default(schema)
        rule = rule_for(tuple(path.split(".")))
        if describe_effect(rule) == "warned":  # no value has an effect
            kind = default = ""
        having = f"Of `{'`, `'.join(choices)}`. " if choices else ""
        described = f"{kind} ({default})" if default else kind
        yield path, rule, (described, f"{mark_effect(rule)}{having}{rule.note}")
        for special in FIELD_RULES:
            if special.field.startswith(f"{path}: "):
                yield special.field, special, ("", f"{mark_effect(special)}{special.note}")


def describe_effect(rule: FieldRule) -> str:
    """Return a field's effect, also in calls where it differs; '' if the field is used in both."""
    if rule.effect == "used":
        return "" if rule.in_calls is None else "not in calls"
    return rule.effect if rule.in_calls is None else f"{rule.effect}; {rule.in_calls} in calls"


def mark_effect(rule: FieldRule) -> str:
    """Return a field's effect as the beginning of a cell; '' if the field is used everywhere."""
    effect = describe_effect(rule)
    return f"**{effect.capitalize()}.** " if effect else ""


def write_tables() -> str:
    """Return the table of the fields with an effect, and that of ignored fields by reason; equal rows are one."""
    with_effect: dict[tuple[str, ...], list[str]] = {}
    ignored: dict[str, list[str]] = {}
    for name, rule, cells in list_cells():
        if describe_effect(rule) == "ignored":
            ignored.setdefault(rule.note, []).append(f"`{name}`")
        else:
            with_effect.setdefault(cells, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {' | '.join(cells)} |\n" for cells, names in with_effect.items()]
    reasons = [f"- {', '.join(names)}: {note}\n" for note, names in ignored.items()]
    return "".join(
        [
            "| field | type (default) | effect |\n|---|---|---|\n",
            *rows,
            "\n## Ignored fields\n\n",
            *reasons,
        ]
    )


def main() -> int:
    """Return 1 if the page is not as it should be and must not be written."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    written = f"{before}{BEGIN}{write_tables()}{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        return int(written != page)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
