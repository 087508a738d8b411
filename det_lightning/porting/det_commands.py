"""The program ``det``: its commands, and those of ``det-lightning`` that replace them."""

from __future__ import annotations

import re

from det_lightning.porting.findings import Finding, Need, Severity, line_at

_WORD = r"(?:\\[^\r\n]|\"[^\"\n]*\"|'[^'\n]*'|\$\([^)\n]*\)|[^\s;&|#`)\"'\\])+"
_GAP = r"(?:[ \t]|\\\r?\n)+"
_COMMAND = re.compile(rf"(?P<before>^|[\s;&|(`@!])(?P<command>det(?={_GAP}[\w-])(?:{_GAP}{_WORD})+)", re.MULTILINE)
_WORDS = re.compile(_WORD)

_GROUPS = {
    "experiment": "experiment", "e": "experiment", "exp": "experiment",
    "checkpoint": "checkpoint", "c": "checkpoint",
    "trial": "trial", "t": "trial",
    "preview-search": "preview-search", "tensorboard": "tensorboard",
    **dict.fromkeys(
        ("a", "agent", "auth", "cmd", "command", "deploy", "dev", "job", "j", "master", "m", "model", "notebook",
         "oauth", "p", "project", "resources", "resource-pool", "resource", "rp", "shell", "slot", "s", "task",
         "template", "tpl", "user", "u", "user-group", "version", "w", "workspace"),
        "",
    ),
}  # fmt: skip
_GLOBAL_OPTIONS = ("-m", "--master", "-u", "--user")
# Flags of `det experiment create` that mean nothing if experiments run in the foreground and in no project.
_DROPPED_FLAGS = ("-f", "--follow", "--follow-first-trial")
_DROPPED_OPTIONS = ("--project_id", "--project-id")

# What to do about commands that cannot be translated, mostly because they name an experiment by its number.
_KEEP = "remove it, or keep it for as long as there is a master"
_SHOW = "det-lightning experiment show EXPERIMENT, with its directory"
_LOGS = "det-lightning experiment logs EXPERIMENT TRIAL, with its directory"
_STOP = "det-lightning experiment stop EXPERIMENT, with its directory"
_RESUME = "det-lightning experiment resume EXPERIMENT, with its directory"
_INSTEAD = {
    ("experiment", "create"): "det-lightning run CONFIG DIR",
    ("experiment", "describe"): _SHOW,
    ("experiment", "list-trials"): _SHOW,
    ("experiment", "lt"): _SHOW,
    ("experiment", "logs"): _LOGS,
    ("experiment", "pause"): _STOP,
    ("experiment", "cancel"): _STOP,
    ("experiment", "kill"): _STOP,
    ("experiment", "activate"): _RESUME,
    ("experiment", "continue"): _RESUME,
    ("experiment", "list-checkpoints"): "det-lightning checkpoint ls STORAGE",
    ("experiment", "lc"): "det-lightning checkpoint ls STORAGE",
    ("trial", "describe"): _SHOW,
    ("trial", "logs"): _LOGS,
    ("trial", "download"): "det-lightning checkpoint export STORAGE",
    ("checkpoint", "list"): "det-lightning checkpoint ls STORAGE",
    ("checkpoint", "describe"): "det-lightning checkpoint show CHECKPOINT",
    ("checkpoint", "download"): "det-lightning checkpoint export STORAGE",
    ("checkpoint", "rm"): "det-lightning checkpoint prune STORAGE",
    ("tensorboard", "start"): "tensorboard --logdir experiments",
}


class NoCounterpart(ValueError):
    """A command of ``det`` cannot be translated; the message says what to do."""


def is_det_command(words: list[str]) -> bool:
    """Return whether words, the first of which is ``det``, name one of its commands."""
    return any(word in _GROUPS for word in _without_global_options(words)[:1])


def translated(words: list[str]) -> list[str]:
    """Return the words of what replaces a command of ``det``, or raise NoCounterpart."""
    group, *rest = _without_global_options(words)
    group = _GROUPS.get(group, "")
    if group == "preview-search" and len(rest) == 1:
        return ["det-lightning", "run", *rest, "--dry-run"]
    if (group, rest) in (("experiment", ["list"]), ("experiment", ["ls"])):
        return ["det-lightning", "experiment", "ls"]
    if group == "experiment" and rest[:1] == ["create"]:
        return _run(rest[1:])
    raise NoCounterpart(_INSTEAD.get((group, rest[0] if rest else ""), _KEEP))


def port_det_commands(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with those of ``det`` translated, and findings for those that cannot be."""
    findings = []

    def replaced(found: re.Match[str]) -> str:
        words = _WORDS.findall(found["command"].replace("\\\n", " ").replace("\\\r\n", " "))
        if not is_det_command(words):
            return found.group()
        try:
            return found["before"] + " ".join(translated(words))
        except NoCounterpart as e:
            findings.append(needs_a_master(words, str(e), line_at(text, found.start("command"), first_line)))
            return found.group()

    return _COMMAND.sub(replaced, text), findings


def needs_a_master(words: list[str], advice: str, line: int, need: Need = Need.file) -> Finding:
    """Return the finding for a command of ``det`` that stays."""
    end = len(words) - len(_without_global_options(words)) + 2
    return Finding(line, Severity.problem, f"{' '.join(words[:end])}: it needs a Determined master", advice, need)


def _without_global_options(words: list[str]) -> list[str]:
    rest = words[1:]
    while rest and rest[0].split("=")[0] in _GLOBAL_OPTIONS:
        rest = rest[1:] if "=" in rest[0] else rest[2:]
    return rest


def _run(words: list[str]) -> list[str]:
    given: list[str] = []
    options: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name == "--config":
            options += [word] if equals else [word, next(rest, "")]
        elif name in _DROPPED_OPTIONS:
            if not equals:
                next(rest, "")
        elif word.startswith("-") and word not in _DROPPED_FLAGS:
            raise NoCounterpart(f"det-lightning run CONFIG DIR, which has no option {name}")
        elif not word.startswith("-"):
            given.append(word)
    if len(given) not in (1, 2) or given[-1].endswith(".py") or "" in options:
        raise NoCounterpart("det-lightning run CONFIG DIR, with one configuration and the directory of the code")
    return ["det-lightning", "run", *given, *options]
