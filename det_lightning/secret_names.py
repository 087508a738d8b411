"""Which settings are secrets, by their names."""

from __future__ import annotations

import difflib
import functools
import re

# A name with one of these words names a secret, unless the last word says that it is not the secret itself.
_STRONG = re.compile("secrets?|passwords?|passwd|passphrases?|credentials?|creds")
_DESCRIPTION = re.compile("names?|file|path|dir|length|len|policy|type|arn|ref|required")
_LAST = re.compile("pwd|pw|passcode|userpass|o?auth|authorization|bearer|cookies?|dsn|jwt|sas")
_JOINED = re.compile(
    "((api|access|secret|account|private)key|conn(ection)?str(ing)?|(auth|access|api|session|identity|registry)token|"
    "accesssignature)$"
)
# What a key is for if it is a secret; a sort_key or an image_key is not. Likewise for "pass", short for password.
_OF_KEYS = re.compile(
    "access|account|api|app|auth|aws|azure|client|comet|consumer|deploy|encryption|gcp|hf|hmac|huggingface|kaggle|"
    "license|master|neptune|openai|private|s3|sas|service|session|shared|signing|ssh|storage|subscription|wandb"
)
_OF_PASS = re.compile("admin|db|database|email|ftp|login|mail|proxy|root|sftp|smtp|ssh|user")
# Tokens of a text are not secrets.
_OF_TEXT = re.compile(
    "additional|audio|begin|blank|bo[is]|class|cls|dist|end|eo[is]|extra|fim|first|image|img|last|latent|mask|next|pad|"
    "patch|prefix|prompt|query|register|sep|sos|space|special|start|stop|suffix|system|text|unk|unknown|video|word"
)
# Names of a configuration's secrets, which may be mistyped.
_OFTEN_MISTYPED = (
    "secretkey", "accesskey", "sessiontoken", "password", "registryauth", "connectionstring", "credential",
)  # fmt: skip
_NEARLY = 0.84
_LONGEST = 32

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_WORD = re.compile(r"[^A-Za-z0-9]+")


@functools.lru_cache(4096)
def is_secret_name(name: object) -> bool:
    """Return whether a setting with this name is a secret: ``secret_key``, ``registry_auth``, ``WANDB_API_KEY``, ...

    Names that are close to those of a configuration's secrets count too, because they may be mistyped.
    """
    if not isinstance(name, str):
        return False
    words = _words(name)
    if not words or _DESCRIPTION.fullmatch(words[-1]):
        return False
    joined = "".join(words)
    return bool(
        any(map(_STRONG.fullmatch, words))
        or _LAST.fullmatch(words[-1])
        or _JOINED.search(joined)
        or _is_key(name, words)
        or _is_token(words)
        or _is_pass(name, words)
        or _is_nearly_known(joined)
    )


def _is_nearly_known(joined: str) -> bool:
    return len(joined) <= _LONGEST and any(
        difflib.SequenceMatcher(None, joined, known).ratio() >= _NEARLY for known in _OFTEN_MISTYPED
    )


def _words(name: str) -> list[str]:
    words = [word.lower() for word in _NO_WORD.split(_HUMP.sub("_", name)) if word]
    return words[:-1] if words[-2:] == ["key", "id"] else words


def _is_key(name: str, words: list[str]) -> bool:
    if name.isupper() and words[-1].endswith("key"):  # an environment variable
        return True
    return words[-1] in ("key", "keys") and any(map(_OF_KEYS.fullmatch, words))


def _is_token(words: list[str]) -> bool:
    if words[-1] == "tokens":
        return any(map(_OF_KEYS.fullmatch, words))
    return words[-1] == "token" and not any(map(_OF_TEXT.fullmatch, words))


def _is_pass(name: str, words: list[str]) -> bool:
    return words[-1] == "pass" and (len(words) == 1 or name.isupper() or any(map(_OF_PASS.fullmatch, words)))
