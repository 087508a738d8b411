"""Write the table of the configuration's fields into docs/experiments.md; with --check, only compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from det_lightning.config.effects import FIELD_RULES, FieldRule, rule_for
from det_lightning.config.experiment import ExperimentConfig
from det_lightning.config.length import Length
from det_lightning.config.searchers import SEARCHERS
from det_lightning.config.storage import STORAGES

PAGE = Path(__file__).parent.parent / "docs" / "experiments.md"
BEGIN = "<!-- fields: written by scripts/write_field_table.py -->\n"
END = "<!-- end of fields -->\n"
# What the time of reading or the model's own rules give.
UNWRITTEN = {
    "checkpoint_storage.type": "",
    "log_policies": "two without an action",
    "reproducibility.experiment_seed": "the time",
    "searcher.name": "",
}


def models_of(section: str) -> list[type[BaseModel]]:
    """Return the models of a section; none for a field that is not a section."""
    unions: dict[str, list[Any]] = {"searcher": list(SEARCHERS.values()), "checkpoint_storage": list(STORAGES.values())}
    default = ExperimentConfig.model_fields[section].get_default(call_default_factory=True)
    if section in unions:
        return unions[section]
    return [type(default)] if isinstance(default, BaseModel) else []


def fields() -> Iterator[tuple[str, str]]:
    """Yield each field with its default, if it has one that says something."""
    for name, field in ExperimentConfig.model_fields.items():
        models = reversed(models_of(name))
        found = {f"{name}.{inner}": info for model in models for inner, info in model.model_fields.items()}
        for path, info in (found or {name: field}).items():
            default = info.get_default(call_default_factory=True)
            if path in UNWRITTEN or isinstance(default, BaseModel) or default in (None, "", PydanticUndefined):
                yield path, UNWRITTEN.get(path, "")
            else:
                plain = default.as_plain() if isinstance(default, Length) else default
                yield path, f"`{json.dumps(plain)}`".replace('"', "")


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    for path, default in fields():
        yield row(path, default, rule_for(tuple(path.split("."))))
        yield from (row(rule.field, "", rule) for rule in FIELD_RULES if rule.field.startswith(f"{path}: "))


def row(path: str, default: str, rule: FieldRule) -> str:
    """Return a line of the table."""
    effect = rule.effect if rule.in_calls is None else f"{rule.effect}; {rule.in_calls} in calls"
    return f"| `{path}` | {default} | {effect} | {rule.note} |\n"


def main() -> int:
    """Return 1 if the page is not as it should be and must not be written."""
    table = "| field | default | effect | |\n|---|---|---|---|\n" + "".join(rows())
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    written = f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        return int(written != page)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
