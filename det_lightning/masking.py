"""Secrets in settings and texts: finding them, masking them in output, and refusing to use a mask as a value.

What else settings lack when they are read is refused in the same way.

Only copies that go into a file, a message or a log are masked. A trial reads what it was given.
"""

from __future__ import annotations

import re
import reprlib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from det_lightning.secret_names import is_secret_name

#: What replaces a secret in files and messages; Determined's platform writes the same.
MASK = "********"

# Shorter secrets are not masked in texts: the same few characters may occur anywhere, and a text would be unreadable.
_SHORTEST = 4

# Texts may come from anywhere, so these limits keep every pattern from backtracking over too much of one.
# user:password@ after a scheme. A password may contain anything; a port is not a password.
_USER = r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/:]{0,200}):(?!\d{1,5}(?:[/?#]|$))"
_URL = re.compile(rf"(?<![A-Za-z0-9+.-]){_USER}(\S{{0,1000}})@")
_WHOLE_URL = re.compile(rf"{_USER}(.*)@", re.DOTALL)
_USER_IS_TOKEN = re.compile(r"(https?://)[A-Za-z0-9_-]{16,}@")
_QUERY = re.compile(r"(?i)([?&](?:sig|signature|x-amz-signature|code|key)=)[^&\s'\"]+")
# A name and its value, from the end of ``head``.
_ASSIGNED = re.compile(
    r"(?<![\w.$-])(?P<head>(?P<name>-{0,2}[A-Za-z_][\w.-]*)\s?=\s?)(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&,'\"]+)"
)
_FLAG = re.compile(r"(?<!\S)(?P<head>(?P<name>--[A-Za-z][\w-]*)\s+)(?!-)(?P<value>\S+)")
# As in a line of YAML, which a YAML parser's error shows.
_UNQUOTED = re.compile(
    r"(?m)(?P<head>(?:^[ \t-]*|[{,]\s*)(?P<name>[A-Za-z_][\w.-]*):[ \t]+)(?![\s'\"])(?P<value>[^\s,}][^,}\n]*)"
)
_ENTRY = re.compile(
    r"(?P<head>(?P<quote>[\"'])(?P<name>[A-Za-z_][\w.-]*)(?P=quote)\s*:\s*)"
    r"(?P<value>b?\"(?:[^\"\\]|\\.)*\"|b?'(?:[^'\\]|\\.)*'|\d+)"
)
_ENVIRONMENT = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
_HEADER = re.compile(r"(?i)(\bauthorization\s*:\s*(?:\w+\s+)?|\bbearer\s+(?=[a-z+/=_.~-]{0,200}\d))(?!\*)[^\s'\"]{8,}")
_FORMATS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\bhooks\.slack\.com/services/[\w/-]+"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bsk-(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Z])[\w-]{20,}|\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|\beyJ[\w-]{8,1000}\.eyJ[\w-]{8,1000}\.[\w-]*",
    re.DOTALL,
)


def mask(value: Any) -> Any:
    """Return settings with their secrets masked, safe to be written; ``value`` is not changed.

    The values under names of secrets are masked, with everything below them, and in other strings what
    :func:`mask_text` masks. Anything other than dicts, lists, tuples and strings is returned unchanged.
    """
    if isinstance(value, MaskedSettings):
        value = {**value, **dict.fromkeys(value.masked, MASK)}
    if isinstance(value, Mapping):
        return {name: _mask_all(item, name) if is_secret_name(name) else mask(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        masked = [_mask_argument(item, before) for before, item in zip([None, *value], value, strict=False)]
        return masked if isinstance(value, list) else tuple(masked)
    return _mask_string(value) if isinstance(value, str) else value


def _mask_all(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _mask_all(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item, name) for item in value]
    if value is None or isinstance(value, bool) or value == "":
        return value
    is_count = isinstance(value, int | float) and "token" in name.lower()
    return value if is_count else MASK


def _mask_argument(value: Any, before: Any) -> Any:
    """Mask an item of a list, which may be a command: ``["--api-key", "..."]``."""
    is_flag = isinstance(before, str) and before.startswith("--") and "=" not in before
    return MASK if is_flag and isinstance(value, str) and is_secret_name(before) else mask(value)


def _mask_string(text: str) -> str:
    variable = _ENVIRONMENT.fullmatch(text)
    if variable is not None and is_secret_name(variable[1]):
        return f"{variable[1]}={MASK}"
    return mask_text(mask_url(text))


def mask_url(url: str) -> str:
    """Return a URL with its password masked, whatever characters the password has."""
    return _WHOLE_URL.sub(rf"\1\2:{MASK}@", url, count=1) if _WHOLE_URL.match(url) else url


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text with ``secrets``, passwords in URLs, ``name=value`` of secrets and tokens of known forms masked."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _URL.sub(rf"\1\2:{MASK}@", text)
    text = _FORMATS.sub(MASK, text)
    text = _USER_IS_TOKEN.sub(rf"\1{MASK}@", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    for named_value in (_ASSIGNED, _FLAG, _UNQUOTED, _ENTRY):
        text = named_value.sub(_mask_named, text)
    return text


def _mask_named(found: re.Match[str]) -> str:
    quote = found.groupdict().get("quote", "")
    is_secret = is_secret_name(found["name"]) and (quote or found["value"].strip("'\""))
    return f"{found['head']}{quote}{MASK}{quote}" if is_secret else found.group()


def short_text(value: Any) -> str:
    """Return a short text for a value, without its secrets, even if it is nested or has too many digits to print."""
    try:
        return f"{reprlib.repr(mask(value)):.300}"
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"


def secrets_in(settings: Any) -> Iterator[str]:
    """Yield the strings in ``settings`` that :func:`mask` masks as a whole, and the passwords of URLs."""
    if isinstance(settings, Mapping):
        for name, item in settings.items():
            yield from (_strings(item) if is_secret_name(name) else secrets_in(item))
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from secrets_in(item)
    elif isinstance(settings, str) and (found := _WHOLE_URL.match(settings)) and len(found[3]) >= _SHORTEST:
        yield from {found[3], urllib.parse.unquote(found[3])}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str) and len(value) >= _SHORTEST:
        yield value


def cause_without_secrets(error: BaseException) -> BaseException | None:
    """Return an error for use as a cause, or None if its message, or that of one of its own causes, shows a secret."""
    link: BaseException | None = error
    while link is not None:
        if mask_text(str(link)) != str(link):
            return None
        link = link.__cause__ or link.__context__
    return error


# Reading


class MaskedSettings(dict[Any, Any]):
    """Settings with gaps: secrets that were masked when they were written, so that no mask is taken for a value.

    ``where`` names the settings. Looking up one of the ``masked`` entries is an error, and so is one of those that were
    ``left_out``, whose types this dict has.
    """

    def __init__(
        self, entries: Mapping[Any, Any], where: str, masked: list[Any], left_out: Mapping[Any, str] | None = None
    ) -> None:
        super().__init__(entries)
        self.where = where
        self.masked = masked
        self.left_out = dict(left_out or {})

    def __missing__(self, name: Any) -> Any:
        raise KeyError(self.explain(name) if self.lacks(name) else name)

    def lacks(self, name: Any) -> bool:
        """Return whether there was an entry ``name`` when the settings were written, which is not here."""
        return name not in self and (name in self.masked or name in self.left_out)

    def explain(self, name: Any) -> str:
        """Return why there is no entry ``name``, and what to do."""
        if name in self.left_out:
            return (
                f"{self.where}[{name!r}] was left out where these settings were written: it was a "
                f"{self.left_out[name]:.200}, which JSON cannot hold. Give the settings again (hparams=, exp_conf=)."
            )
        return (
            f"{self.where}[{name!r}] is a secret, which was masked where these settings were written. Give the "
            "settings with their secrets (hparams=, exp_conf=), or take the secret from the environment."
        )


def is_masked(value: Any) -> bool:
    """Return whether a value is a mask, or contains one."""
    return isinstance(value, str) and MASK in value


def leave_out_masked(settings: Any, where: str) -> Any:
    """Return the settings called ``where`` without values that are masks; the same object if there are none."""
    if isinstance(settings, dict):
        kept = {
            name: leave_out_masked(item, f"{where}[{name!r}]") for name, item in settings.items() if not is_masked(item)
        }
        masked = [name for name in settings if name not in kept]
        if not masked and all(kept[name] is settings[name] for name in kept):
            return settings
        left_out = getattr(settings, "left_out", None)
        return MaskedSettings(kept, where, masked, left_out) if masked or left_out else kept
    if isinstance(settings, list):
        items = [leave_out_masked(item, f"{where}[{i}]") for i, item in enumerate(settings) if not is_masked(item)]
        same = len(items) == len(settings) and all(new is old for new, old in zip(items, settings, strict=True))
        return settings if same else items
    return settings


def mark_left_out(settings: Any, where: str, left_out: Mapping[str, Any]) -> Any:
    """Return the settings called ``where`` with gaps where something was left out.

    ``left_out`` has, for each dict by its place, the types of what it lacks; it comes from a file.
    """
    if isinstance(settings, dict):
        kept = {name: mark_left_out(item, f"{where}[{name!r:.100}]", left_out) for name, item in settings.items()}
        noted = left_out.get(where)
        gaps = {name: kind for name, kind in noted.items() if isinstance(kind, str)} if isinstance(noted, dict) else {}
        return MaskedSettings(kept, where, [], gaps)
    if isinstance(settings, list):
        return [mark_left_out(item, f"{where}[{index}]", left_out) for index, item in enumerate(settings)]
    return settings
