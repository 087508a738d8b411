"""Decides which fields of a configuration are secrets, and masks them in output and files.

Hyperparameters and ``data`` hold no secrets, whatever their names and values. Only copies for a file, a message or a
log are masked: a trial reads the settings as given.
"""

from __future__ import annotations

import re
import reprlib
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

#: What replaces a secret in files and messages; Determined's platform writes the same.
MASK = "********"

_STORAGES = ("checkpoint_storage", "tensorboard_storage", "data_layer")
#: The entries of a storage's section that are secrets.
CREDENTIALS = frozenset({"access_key", "secret_key", "session_token", "connection_string", "credential"})
# The options of fsspec's file systems and of the clients below that are secrets; options are masked like a section.
_OPTIONS = {
    *("key", "secret", "token", "password", "passwd", "passphrase", "pkey", "auth", "headers", "account_key"),
    *("sas_token", "client_secret", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
}
_VARIABLES = ("environment", "environment_variables")
_KINDS = {"environment_variables", "cpu", "cuda", "gpu", "rocm"}  # of lists of variables, by the last key
_OTHERS = (_VARIABLES, ("environment", "registry_auth"), ("integrations", "pachyderm", "dataset", "token"))

# Shorter secrets are not masked in texts: the same few characters may occur anywhere, and a text would be unreadable.
_SHORTEST = 8

# user:password@ after a scheme. A password may contain anything; a port is not a password. The limits keep the patterns
# from backtracking over too much of a text, which may come from anywhere.
_USER = r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s/:]{0,200}):(?!\d{1,5}(?:[/?#]|$))"
_WHOLE_URL = re.compile(rf"{_USER}(.*)@", re.DOTALL)
_URL_IN_TEXT = re.compile(rf"(?<![A-Za-z0-9+.-]){_USER}(\S{{0,1000}})@")
_SIGNATURE = re.compile(r"(?i)([?&](?:sig|signature|x-(?:amz|goog)-signature|x-amz-security-token)=)[^&\s'\"]+")

#: The keys that lead to a value; positions in lists are left out.
Keys = tuple[Any, ...]


def is_secret(keys: Keys) -> bool:
    """Return whether a value of a configuration, found by keys, is a secret or a part of one."""
    in_storage = keys[:1] and keys[0] in _STORAGES and not (CREDENTIALS | _OPTIONS).isdisjoint(keys[1:])
    return bool(in_storage) or any(keys[: len(field)] == field for field in _OTHERS)


def mask_config(config: Any, keys: Keys = ()) -> Any:
    """Return a configuration, or the part of one found by ``keys``, with all secrets masked; ``config`` stays as is."""
    if isinstance(config, Mapping):
        return {name: mask_config(item, (*keys, name)) for name, item in config.items()}
    if isinstance(config, list | tuple):
        masked = [mask_config(item, keys) for item in config]
        return masked if isinstance(config, list) else tuple(masked)
    if config is None or config == "" or isinstance(config, bool):
        return config
    if keys[:2] == _VARIABLES and keys[-1] in _KINDS and isinstance(config, str):
        return re.sub("(?s)=.+", f"={MASK}", config, count=1)  # a name alone passes a variable on
    if is_secret(keys):
        return MASK
    return mask_text(mask_url(config)) if isinstance(config, str) and keys[:1] and keys[0] in _STORAGES else config


def mask_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's file, with the secrets of the ``experiment_config`` in it masked."""
    return {name: mask_config(item, () if name == "experiment_config" else (None,)) for name, item in settings.items()}


def mask_url(url: str) -> str:
    """Return a URL with its password masked, whatever characters the password has."""
    return _WHOLE_URL.sub(rf"\1\2:{MASK}@", url, count=1) if _WHOLE_URL.match(url) else url


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text with ``secrets``, and the passwords and signatures of URLs, masked."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _SIGNATURE.sub(rf"\1{MASK}", _URL_IN_TEXT.sub(rf"\1\2:{MASK}@", text))


def short_text(value: Any) -> str:
    """Return a short text for a value, without passwords in URLs, even for nested values and very large numbers."""
    try:
        return f"{mask_text(reprlib.repr(value)):.300}"
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"


def find_secrets(config: Any, keys: Keys = ()) -> Iterator[str]:
    """Yield the texts that :func:`mask_config` masks, without those that are too short to be masked in a text."""
    if isinstance(config, Mapping):
        for name, item in config.items():
            yield from find_secrets(item, (*keys, name))
    elif isinstance(config, list | tuple):
        for item in config:
            yield from find_secrets(item, keys)
    elif isinstance(config, str):
        secret = config.partition("=")[2] if keys[:2] == _VARIABLES else config if is_secret(keys) else ""
        found = _WHOLE_URL.match(config) if keys[:1] and keys[0] in _STORAGES else None
        passwords = {found[3], urllib.parse.unquote(found[3])} if found else set()
        yield from (one for one in (secret, *passwords) if len(one) >= _SHORTEST)


def find_option_secrets(options: Any) -> list[str]:
    """Return the secrets among the options of a file system, or in its URL, for :func:`mask_text`."""
    return [*find_secrets({"checkpoint_storage": options})]


def cause_without_secrets(error: BaseException, secrets: Collection[str] = ()) -> BaseException | None:
    """Return an error for use as a cause, or None if it or one of its causes shows a secret."""
    link: BaseException | None = error
    while link is not None:
        if mask_text(str(link), secrets) != str(link):
            return None
        link = link.__cause__ or link.__context__
    return error


def is_masked(value: Any) -> bool:
    """Return whether a value is a mask, contains one, or is a list of such values among others."""
    return any(map(is_masked, value)) if isinstance(value, list) else isinstance(value, str) and MASK in value
