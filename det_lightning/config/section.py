"""The base of all sections: strict types, null for the default, plain error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from det_lightning.arguments import find_similar, suggest
from det_lightning.config.document import KeyPath
from det_lightning.hyperparameters import convert_like_master
from det_lightning.masking import is_secret, mask_config, mask_text

_Kind = Literal["configuration", "unknown_key"]
_OURS: _Kind = "configuration"
#: The type of pydantic's errors about unknown keys.
UNKNOWN_KEY: _Kind = "unknown_key"
# In a message, the given value after the limit, or a quoted value.
_VALUES = re.compile(r"(?:, [^,;]*)?; got .*| '.*'", re.DOTALL)
# The expectations by pydantic's error type, formatted with the context of the error.
_EXPECTED = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le:g}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be a mapping",
    "string_type": "must be a string",
    "too_short": "must not be empty",
}


def mistake(path: KeyPath, message: str, kind: _Kind = _OURS) -> InitErrorDetails:
    """Return a mistake for :func:`raise_all`; its path is relative to the validated value."""
    return InitErrorDetails(type=PydanticCustomError(kind, "{m}", {"m": message}), loc=path, input=None)


def collect_mistakes(error: ValidationError, below: KeyPath = (), place: KeyPath = ()) -> Iterator[InitErrorDetails]:
    """Yield the mistakes in the value at ``below``; messages about a secret show no values.

    ``place`` is where the value is in a configuration, which decides what in it is secret.
    """
    for found in error.errors(include_url=False):
        kind = UNKNOWN_KEY if found["type"] == UNKNOWN_KEY else _OURS
        message = _message(found)
        shown = _VALUES.sub("", message) if is_secret((*place, *found["loc"])) else message
        yield mistake((*below, *found["loc"]), shown, kind)


def raise_all(mistakes: list[InitErrorDetails]) -> None:
    """Raise the mistakes in a value together, if there are any."""
    if mistakes:
        raise ValidationError.from_exception_data("configuration", mistakes)


def refuse(path: KeyPath, message: str) -> NoReturn:
    """Raise a single mistake."""
    raise ValidationError.from_exception_data("configuration", [mistake(path, message)])


def _message(found: Any) -> str:
    kind = found["type"]
    if kind in (_OURS, UNKNOWN_KEY):
        return str(found["msg"])
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(found["ctx"]["error"])
    expected = _EXPECTED[kind].format(**found.get("ctx", {})) if kind in _EXPECTED else str(found["msg"])
    return f"{expected}; got {show_value(found['input'])}"


def show_value(value: Any) -> str:
    """Return a value for messages: in YAML's spelling, on a single line, shortened, without passwords in URLs."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = mask_text(repr(value))
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _explain_unknown(name: str, section: type[Section]) -> str:
    """Return a message for an unknown key: a key of another variant of the section, or a similar key."""
    elsewhere = {key for sibling in section.siblings.values() for key in sibling.model_fields}
    near = find_similar(name, elsewhere)
    if near is not None and (near == name or find_similar(name, section.model_fields) is None):
        having = [kind for kind, sibling in section.siblings.items() if near in sibling.model_fields]
        of = next((f"of {kind}" for kind, one in section.siblings.items() if one is section), "without a type")
        meant = " here; it" if near == name else f"; did you mean {near}? It"
        return f"unknown key{meant} is a key of {', '.join(having)}, not {of}"
    return f"unknown key{suggest(name, section.model_fields)}"


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: For values of any type known to JSON, unchecked by Determined's master.
UNTYPED = AfterValidator(convert_like_master)
#: Larger integers overflow in Determined's master.
INTEGER_LIMIT = 2**63
#: Determined accepts 5.0 as an integer, but neither true nor "5".
Integer = Annotated[int, BeforeValidator(_integral), Field(ge=-INTEGER_LIMIT, lt=INTEGER_LIMIT)]
Count = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Integer, Field(ge=1)]


SectionT = TypeVar("SectionT", bound="Section")


def variants(key: str, *models: type[SectionT]) -> dict[str, type[SectionT]]:
    """Return the models, by the default of their field ``key``."""
    found: dict[str, type[SectionT]] = {model.model_fields[key].default: model for model in models}
    for model in models:
        model.siblings = found
    return found


def read_variant(
    value: Any, key: str, models: Mapping[str, type[SectionT]], refused: Mapping[str, str] | None = None
) -> SectionT:
    """Return the section in a mapping, selected from ``models`` by the entry ``key``; raise a ValidationError.

    ``refused`` has the advice for values known to older releases only.
    """
    if not isinstance(value, dict):
        refuse((), f"must be a mapping; got {show_value(value)}")
    name = value.get(key)
    if name is None:
        refuse((key,), f"is missing; known are {', '.join(models)}")
    if isinstance(name, str) and refused is not None and name in refused:
        refuse((key,), f"{name} cannot be used: {refused[name]}")
    if not isinstance(name, str) or name not in models:
        refuse((key,), f"unknown {key} {show_value(name)}{suggest(name, models)}")
    return models[name].model_validate(value)


class Section(BaseModel):
    """A mapping with known keys. Any default may be written as null."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    #: The keys that lead to the section in a configuration, if it holds secrets.
    place: ClassVar[KeyPath] = ()
    #: The sections that another name or type chooses in place of this one.
    siblings: ClassVar[Mapping[str, type[Section]]] = {}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, mask_config(value, (*self.place, name))

    @model_validator(mode="wrap")
    @classmethod
    def _report_together(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if not isinstance(value, dict):
            return handler(value)
        mistakes = []
        known = {}
        for name, item in value.items():
            if (field := cls.model_fields.get(name)) is None:
                mistakes.append(mistake((name,), _explain_unknown(name, cls), UNKNOWN_KEY))
            elif item is not None or field.is_required():
                known[name] = item
        try:
            section = handler(known)
        except ValidationError as e:
            mistakes += collect_mistakes(e, place=cls.place)
        raise_all(mistakes)
        return section
