"""Secrets of a configuration: known by their fields, masked in output and files, and never read back as a value.

Hyperparameters and ``data`` hold no secrets, whatever their names and values. Only copies for a file, a message or a
log are masked: a trial reads the settings that the user gave.
"""

from __future__ import annotations

import re
import reprlib
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
    if isinstance(config, MaskedSettings):
        config = {**config, **dict.fromkeys(config.masked, MASK)}
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
    """Return a URL with the password masked, for any characters in the password."""
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
    """Return an error for use as a cause, or None if a message in the chain of causes shows a secret."""
    link: BaseException | None = error
    while link is not None:
        if mask_text(str(link), secrets) != str(link):
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
    """Return whether a value is a mask, contains one, or is a list of such values among others."""
    return any(map(is_masked, value)) if isinstance(value, list) else isinstance(value, str) and MASK in value


def may_be_masked(keys: Keys) -> bool:
    """Return whether :func:`mask_config` may have masked a value of a configuration, found by keys."""
    return is_secret(keys) or keys[0] in _STORAGES


def leave_out_masked(settings: Any, where: str, is_mask: Callable[[str, Keys], bool], keys: Keys = ()) -> Any:
    """Return the settings called ``where`` with a gap for each mask; the same object if there are none.

    ``is_mask`` is asked about values with stars, by place (such as ``hparams['a']``) and keys: a user may write stars.
    """
    if isinstance(settings, list):
        items = [leave_out_masked(item, f"{where}[{i}]", is_mask, keys) for i, item in enumerate(settings)]
        return settings if list(map(id, items)) == list(map(id, settings)) else items
    if not isinstance(settings, dict):
        return settings
    places = {name: (f"{where}[{name!r:.100}]", (*keys, name)) for name in settings}
    masked = [name for name, item in settings.items() if is_masked(item) and is_mask(*places[name])]
    kept = {
        name: leave_out_masked(item, places[name][0], is_mask, places[name][1])
        for name, item in settings.items()
        if name not in masked
    }
    if not masked and all(item is settings[name] for name, item in kept.items()):
        return settings
    gaps = (settings.masked, settings.left_out) if isinstance(settings, MaskedSettings) else ([], None)
    return MaskedSettings(kept, where, [*masked, *gaps[0]], gaps[1])


def find_stars(settings: Any, where: str) -> list[str]:
    """Return the places in settings called ``where`` for which :func:`leave_out_masked` would ask."""
    places: list[str] = []

    def note(place: str, keys: Keys) -> bool:
        places.append(place)
        return False

    leave_out_masked(settings, where, note)
    return places


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
