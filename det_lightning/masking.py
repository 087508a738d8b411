"""Secrets in settings and texts: recognized by name or form, masked in output, and never read back as a value.

Only copies for a file, a message or a log are masked. A trial reads the settings that the user gave.
"""

from __future__ import annotations

import difflib
import functools
import re
import reprlib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: What replaces a secret in files and messages; Determined's platform writes the same.
MASK = "********"

# Shorter secrets are not masked in texts: the same few characters may occur anywhere, and a text would be unreadable.
_SHORTEST = 4

# A sort_key, an image_key, a forward_pass or a pad_token is no secret: these words tell.
_OF_KEYS = (
    "access|account|api|app|auth|aws|azure|client|comet|consumer|deploy|encryption|gcp|hf|hmac|huggingface|kaggle|"
    "license|master|neptune|openai|private|s3|sas|service|session|shared|signing|ssh|storage|subscription|wandb"
)
_OF_PASSWORDS = "admin|db|database|email|ftp|login|mail|proxy|root|sftp|smtp|ssh|user"
_OF_TEXT = (
    "additional|audio|begin|blank|bo[is]|class|cls|dist|end|eo[is]|extra|fim|first|image|img|last|latent|mask|next|pad|"
    "patch|prefix|prompt|query|register|sep|sos|space|special|start|stop|suffix|system|text|unk|unknown|video|word"
)
# Names in lower case, with "_" between words: of the file or the length of a secret, and of secrets.
_DESCRIPTION = re.compile("(?:.*_)?(?:names?|file|path|dir|length|len|policy|type|arn|ref|required)")
_SECRET_NAME = re.compile(
    rf"""(?:.*_)?(?:secrets?|passwords?|passwd|passphrases?|credentials?|creds)(?:_.*)?
    |(?:.*_)?(?:pwd|pw|passcode|userpass|o?auth|authorization|bearer|cookies?|dsn|jwt|sas)
    |.*(?:api|access|secret|account|private)_?key
    |.*(?:conn(?:ection)?_?str(?:ing)?|(?:auth|access|api|session|identity|registry)_?token|access_?signature)
    |(?:.*_)?(?:{_OF_KEYS})_(?:.*_)?(?:keys?|tokens)
    |(?!(?:.*_)?(?:{_OF_TEXT})_)(?:.*_)?token
    |(?:(?:.*_)?(?:{_OF_PASSWORDS})_(?:.*_)?)?pass""",
    re.VERBOSE,
)
# Names of a configuration's secrets, which may be mistyped.
_OFTEN_MISTYPED = (
    "secretkey", "accesskey", "sessiontoken", "password", "registryauth", "connectionstring", "credential",
)  # fmt: skip
_LONGEST_NAME = 200
_LONGEST_MISTYPED = 32

# Texts may come from anywhere, so these limits keep every pattern from backtracking over too much of one.
# user:password@ after a scheme. A password may contain anything; a port is not a password.
_USER = r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/:]{0,200}):(?!\d{1,5}(?:[/?#]|$))"
_WHOLE_URL = re.compile(rf"{_USER}(.*)@", re.DOTALL)
# Secrets by form, each with the replacement.
_FORMS = {
    rf"(?<![A-Za-z0-9+.-]){_USER}(\S{{0,1000}})@": rf"\1\2:{MASK}@",
    r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)": MASK,
    r"\bhooks\.slack\.com/services/[\w/-]+|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{22,}|\bglpat-[\w-]{20,}|\bhf_[A-Za-z0-9]{30,}"
    r"|\bsk-(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Z])[\w-]{20,}|\beyJ[\w-]{8,1000}\.eyJ[\w-]{8,1000}\.[\w-]*": MASK,
    r"(https?://)[A-Za-z0-9_-]{16,}@": rf"\1{MASK}@",
    r"(?i)([?&](?:sig|signature|x-amz-signature|code|key)=)[^&\s'\"]+": rf"\1{MASK}",
    r"(?i)(\bauthorization\s*:\s*(?:\w+\s+)?|\bbearer\s+(?=[a-z+/=_.~-]{0,200}\d))(?!\*)[^\s'\"]{8,}": rf"\1{MASK}",
}
# A name and a value, at the end of ``head``: an assignment, a flag, a line of YAML as a parser's error shows, a dict.
_NAMED_VALUES = (
    r"(?<![\w.$-])(?P<head>(?P<name>-{0,2}[A-Za-z_][\w.-]*)\s?=\s?)(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&,'\"]+)",
    r"(?<!\S)(?P<head>(?P<name>--[A-Za-z][\w-]*)\s+)(?!-)(?P<value>\S+)",
    r"(?m)(?P<head>(?:^[ \t-]*|[{,]\s*)(?P<name>[A-Za-z_][\w.-]*):[ \t]+)(?![\s'\"])(?P<value>[^\s,}][^,}\n]*)",
    r"(?P<head>(?P<quote>[\"'])(?P<name>[A-Za-z_][\w.-]*)(?P=quote)\s*:\s*)"
    r"(?P<value>b?\"(?:[^\"\\]|\\.)*\"|b?'(?:[^'\\]|\\.)*'|\d+)",
)


@functools.lru_cache(4096)
def is_secret_name(name: object) -> bool:
    """Return whether a setting with this name is a secret: ``secret_key``, ``registry_auth``, ``WANDB_API_KEY``, ...

    Misspelled names of a configuration's secrets count too.
    """
    if not isinstance(name, str):
        return False
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name[-_LONGEST_NAME:])
    words = re.sub(r"(?<![^_])key_id$", "key", separated.lower().strip("_"))
    if _DESCRIPTION.fullmatch(words):
        return False
    # Environment variables are in upper case.
    if _SECRET_NAME.fullmatch(words) or (name.isupper() and words.endswith(("key", "_pass"))):
        return True
    joined = words.replace("_", "")
    is_short = len(joined) <= _LONGEST_MISTYPED
    return is_short and bool(difflib.get_close_matches(joined, _OFTEN_MISTYPED, 1, cutoff=0.84))


def mask(value: Any) -> Any:
    """Return settings with all secrets masked, safe to be written; ``value`` is not changed.

    Under the name of a secret everything is masked; other strings are masked as by :func:`mask_text`. Anything other
    than dicts, lists, tuples and strings is returned unchanged.
    """
    return _mask(value, "")


def _mask(value: Any, secret: str) -> Any:
    """Mask a value below the name of a ``secret``, or elsewhere if the name is empty."""
    if isinstance(value, MaskedSettings):
        value = {**value, **dict.fromkeys(value.masked, MASK)}
    if isinstance(value, Mapping):
        return {name: _mask(item, secret or (name if is_secret_name(name) else "")) for name, item in value.items()}
    if isinstance(value, list | tuple):
        # A list may be a command: ["--api-key", "..."].
        flags = ["", *(one if isinstance(one, str) and one[:2] == "--" and "=" not in one else "" for one in value)]
        masked = [
            _mask(item, secret or (flag if isinstance(item, str) and is_secret_name(flag) else ""))
            for flag, item in zip(flags, value, strict=False)
        ]
        return masked if isinstance(value, list) else tuple(masked)
    if secret:
        is_count = isinstance(value, int | float) and "token" in secret.lower()
        return value if value is None or value == "" or isinstance(value, bool) or is_count else MASK
    if not isinstance(value, str):
        return value
    variable = re.fullmatch(r"(?s)([A-Za-z_][\w.-]*)=.+", value)
    return f"{variable[1]}={MASK}" if variable and is_secret_name(variable[1]) else mask_text(mask_url(value))


def mask_url(url: str) -> str:
    """Return a URL with the password masked, for any characters in the password."""
    return _WHOLE_URL.sub(rf"\1\2:{MASK}@", url, count=1) if _WHOLE_URL.match(url) else url


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text with ``secrets``, passwords in URLs, ``name=value`` of secrets and tokens of known forms masked."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for pattern, replacement in _FORMS.items():
        text = re.sub(pattern, replacement, text)
    for pattern in _NAMED_VALUES:
        text = re.sub(pattern, _mask_named, text)
    return text


def _mask_named(found: re.Match[str]) -> str:
    quote = found.groupdict().get("quote", "")
    is_secret = is_secret_name(found["name"]) and (quote or found["value"].strip("'\""))
    return f"{found['head']}{quote}{MASK}{quote}" if is_secret else found.group()


def short_text(value: Any) -> str:
    """Return a short text for a value, without secrets, even for nested values and very large numbers."""
    try:
        return f"{reprlib.repr(mask(value)):.300}"
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"


def find_secrets(settings: Any, below_secret: bool = False) -> Iterator[str]:
    """Yield the strings in ``settings`` that :func:`mask` masks as a whole, and the passwords of URLs."""
    if isinstance(settings, Mapping):
        for name, item in settings.items():
            yield from find_secrets(item, below_secret or is_secret_name(name))
    elif isinstance(settings, list | tuple):
        for item in settings:
            yield from find_secrets(item, below_secret)
    elif isinstance(settings, str) and below_secret:
        yield from [settings] if len(settings) >= _SHORTEST else []
    elif isinstance(settings, str) and (found := _WHOLE_URL.match(settings)) and len(found[3]) >= _SHORTEST:
        yield from {found[3], urllib.parse.unquote(found[3])}


def cause_without_secrets(error: BaseException) -> BaseException | None:
    """Return an error for use as a cause, or None if a message in the chain of causes shows a secret."""
    link: BaseException | None = error
    while link is not None:
        if mask_text(str(link)) != str(link):
            return None
        link = link.__cause__ or link.__context__
    return error


class MaskedSettings(dict[Any, Any]):
    """Settings with gaps, so that no mask is taken for a value; ``where`` is the name of the settings.

    Looking up an entry among ``masked`` raises an error with the reason, as does an entry of ``left_out``: a dict with
    the type of each value that a file could not hold.
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
        """Return whether the entry ``name`` was masked or left out, and is missing now."""
        return name not in self and (name in self.masked or name in self.left_out)

    def explain(self, name: Any) -> str:
        """Return why there is no entry ``name``, and what to do."""
        if name in self.left_out:
            return (
                f"{self.where}[{name!r}] was left out where these settings were written: it was a "
                f"{self.left_out[name]:.200}, which JSON cannot hold. Pass the settings again (hparams=, exp_conf=)."
            )
        return (
            f"{self.where}[{name!r}] is a secret, which was masked where these settings were written. Pass the "
            "settings with their secrets (hparams=, exp_conf=), or take the secret from the environment."
        )


def is_masked(value: Any) -> bool:
    """Return whether a value is a mask, or contains one."""
    return isinstance(value, str) and MASK in value


def leave_out_masked(settings: Any, where: str) -> Any:
    """Return the settings called ``where`` without masked values; the same object if there are none."""
    if isinstance(settings, dict):
        kept = {
            name: leave_out_masked(item, f"{where}[{name!r}]") for name, item in settings.items() if not is_masked(item)
        }
        masked = [name for name in settings if name not in kept]
        left_out = getattr(settings, "left_out", None)
        if masked or any(kept[name] is not settings[name] for name in kept):
            return MaskedSettings(kept, where, masked, left_out) if masked or left_out else kept
    if isinstance(settings, list):
        items = [leave_out_masked(item, f"{where}[{i}]") for i, item in enumerate(settings) if not is_masked(item)]
        if list(map(id, items)) != list(map(id, settings)):
            return items
    return settings


def mark_left_out(settings: Any, where: str, left_out: Mapping[str, Any]) -> Any:
    """Return the settings called ``where`` with a gap for each value that the file could not hold.

    ``left_out`` comes from the file: for the place of each dict, the types of the missing values.
    """
    if isinstance(settings, dict):
        kept = {name: mark_left_out(item, f"{where}[{name!r:.100}]", left_out) for name, item in settings.items()}
        noted = left_out.get(where)
        gaps = {name: kind for name, kind in noted.items() if isinstance(kind, str)} if isinstance(noted, dict) else {}
        return MaskedSettings(kept, where, [], gaps)
    if isinstance(settings, list):
        return [mark_left_out(item, f"{where}[{index}]", left_out) for index, item in enumerate(settings)]
    return settings
