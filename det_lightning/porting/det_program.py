"""The program ``det`` in shell commands and in lists of words, and the replacements of its commands."""

from __future__ import annotations

import re

from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at

# No redirection like 2>&1; ${{ }} is an expression of GitHub Actions.
_WORD = r"(?!\d*[<>])(?:\\[^\r\n]|\"[^\"\n]*\"|'[^'\n]*'|\$\([^)\n]*\)|\$\{\{[^}\n]*\}\}|[^\s;&|<>#`)\"'\\])+"
_GAP = r"(?:[ \t]|\\\r?\n)+"
_PROGRAM = r"(?:[^\s;&|<>#`()@!\"'\\]{0,200}/bin/)?det"
# A line of a Makefile may begin with a sign.
_BEFORE = r"(?P<before>^[\t@+-]*|[\s;&|(`@!\"'])"
_COMMAND = re.compile(rf"{_BEFORE}(?P<command>{_PROGRAM}(?={_GAP}[\w-])(?:{_GAP}{_WORD})+)", re.MULTILINE)
_WORDS = re.compile(_WORD)
# Readers of a command's output: programs after a pipe, and substitutions around the command.
_READ_BY = re.compile(r"[ \t]*(?:2>&1[ \t]*)?\|[ \t]*(?:[ef]?grep|g?awk|cut|jq|perl|python3?|sed|tr|xargs)\b")
_IN_COMMENT = re.compile(r"(?:^|\s)#")
_READ_IN = re.compile(r"(?:\$\(|`|=[ \t]*!)[ \t]*$")

_GROUPS = {
    "experiment": "experiment", "e": "experiment", "exp": "experiment",
    "checkpoint": "checkpoint", "c": "checkpoint",
    "trial": "trial", "t": "trial",
    "preview-search": "preview-search", "tensorboard": "tensorboard",
    **dict.fromkeys(
        ("a", "agent", "auth", "cmd", "command", "config-policies", "cp", "d", "deploy", "dev", "job", "j", "master",
         "m", "model", "notebook", "oauth", "p", "project", "rbac", "res", "resources", "resource-pool", "resource",
         "rp", "shell", "slot", "s", "task", "template", "tkn", "token", "tpl", "user", "u", "user-group", "version",
         "w", "workspace"),
        "",
    ),
}  # fmt: skip
# Groups that are commands, and the commands of other groups: without a command, "det model" is plain text.
_ALONE = {"preview-search", "version"}
_COMMANDS = {
    "activate", "add", "add-user", "agg", "aggregated", "alloc", "allocations", "archive", "assign-role", "auth-token",
    "aws", "b", "bindings", "c", "call", "cancel", "change-name", "change-password", "cleanup-logs", "client",
    "cluster-message", "config", "continue", "create", "curl", "deactivate", "delete", "delete-tb-files", "describe",
    "describe-role", "disable", "download", "download-model-def", "edit", "enable", "fork", "gcp", "gke",
    "gke-experimental", "info", "kill", "label", "lc", "link-with-agent-user", "list", "list-checkpoints",
    "list-experiments", "list-groups-roles", "list-members", "list-pools", "list-projects", "list-providers",
    "list-roles", "list-trials", "list-users-roles", "list-versions", "list-workspaces", "local", "login", "logout",
    "logs", "ls", "lt", "move", "my-permissions", "open", "pause", "priority", "raw", "register", "register-version",
    "remove", "remove-user", "rename", "resource-quota", "revoke", "rm", "run", "set", "set-value", "show",
    "show-ssh-command", "show_ssh_command", "start", "support-bundle", "u", "unarchive", "unassign-role", "unpause",
    "update", "update-batch", "wait", "whoami",
}  # fmt: skip
_GLOBAL_OPTIONS = ("-m", "--master", "-u", "--user")
# Flags of `det experiment create` without meaning for experiments in the foreground and outside of projects.
_DROPPED_FLAGS = ("-f", "--follow", "--follow-first-trial")
_TEST_FLAGS = ("--local", "--test")
_DROPPED_OPTIONS = ("--project_id", "--project-id")

# Advice for untranslatable commands; most name an experiment by number.
_KEEP = "remove it, or keep it for as long as there is a master"
_INSTEAD = {
    "det-lightning run CONFIG DIR": ("experiment create",),
    "det-lightning experiment show EXPERIMENT, with its directory": (
        "experiment describe", "experiment list-trials", "experiment lt", "trial describe",
    ),
    "det-lightning experiment logs EXPERIMENT TRIAL, with its directory": ("experiment logs", "trial logs"),
    "det-lightning experiment stop EXPERIMENT, with its directory": (
        "experiment pause", "experiment cancel", "experiment kill",
    ),
    "det-lightning experiment resume EXPERIMENT, with its directory": ("experiment activate", "experiment continue"),
    "det-lightning checkpoint ls STORAGE": ("experiment list-checkpoints", "experiment lc", "checkpoint list"),
    "det-lightning checkpoint show CHECKPOINT": ("checkpoint describe",),
    "det-lightning checkpoint export STORAGE": ("experiment download", "trial download", "checkpoint download"),
    "det-lightning checkpoint prune STORAGE": ("checkpoint rm",),
    "remove it: det-lightning run returns at the end of the experiment": ("experiment wait",),
    "tensorboard --logdir experiments": ("tensorboard start",),
}  # fmt: skip


class NoCounterpart(ValueError):
    """A command of ``det`` has no translation; the message says how to go on."""


def is_det_command(words: list[str]) -> bool:
    """Return whether words begin with ``det``, with or without a directory, and name a command of Determined."""
    if not words or not re.fullmatch(_PROGRAM, words[0]):
        return False
    group, command = [*_without_global_options(words), "", ""][:2]
    # A variable may stand for any command, at least after a group that is no ordinary word.
    is_put_in = command.startswith(("{", "$")) and bool(_GROUPS.get(group))
    return group in _ALONE or (group in _GROUPS and (command in _COMMANDS or is_put_in))


def translate(words: list[str]) -> list[str]:
    """Return the words of the command to run instead of a command of ``det``, or raise NoCounterpart."""
    group, *rest = _without_global_options(words)
    group = _GROUPS.get(group, "")
    if group == "preview-search" and len(rest) == 1:
        return ["det-lightning", "run", *rest, "--dry-run"]
    if (group, rest) in (("experiment", ["list"]), ("experiment", ["ls"])):
        return ["det-lightning", "experiment", "ls"]
    if group == "experiment" and rest[:1] == ["create"]:
        return _run(rest[1:])
    command = " ".join([group, *rest[:1]])
    raise NoCounterpart(next((instead for instead, commands in _INSTEAD.items() if command in commands), _KEEP))


def port_det_commands(text: str, first_line: int = 1, is_read: bool = False) -> tuple[str, list[Finding]]:
    """Return shell commands with all commands of ``det`` translated, and findings for the untranslatable rest.

    With ``is_read``, the output of every command is read, and each translation is a finding because its output differs.
    Without, only commands in pipes and substitutions count as read.
    """
    findings = []

    def replace(found: re.Match[str]) -> str:
        words = _WORDS.findall(found["command"].replace("\\\n", " ").replace("\\\r\n", " "))
        begin = text.rfind("\n", 0, found.start("command")) + 1
        if not is_det_command(words) or _IN_COMMENT.search(text, begin, found.start("command")):
            return found.group()
        line = line_at(text, found.start("command"), first_line)
        try:
            new = translate(words)
        except NoCounterpart as e:
            findings.append(needs_a_master(words, str(e), line))
            return found.group()
        if is_read or _READ_BY.match(text, found.end()) or _READ_IN.search(text, begin, found.start("command")):
            findings.append(prints_something_else(words, line))
        return found["before"] + " ".join(new)

    return _COMMAND.sub(replace, text), findings


def needs_a_master(words: list[str], advice: str, line: int, need: Need = Need.file) -> Finding:
    """Return the finding for an untranslatable command of ``det``."""
    return Finding(line, Severity.problem, f"{_short(words)}: it needs a Determined master", advice, need)


def prints_something_else(words: list[str], line: int) -> Finding:
    """Return the finding for a translated command with a reader of its output."""
    reason = f"{_short(words)}: the output is read, and the new command prints something else"
    advice = "det-lightning experiment ls --json lists experiments, and det-lightning run returns at the end of one"
    return Finding(line, Severity.check, reason, advice, premise=Premise.changed)


def _short(words: list[str]) -> str:
    return " ".join(words[: len(words) - len(_without_global_options(words)) + 2])


def _without_global_options(words: list[str]) -> list[str]:
    rest = words[1:]
    while rest and rest[0].split("=")[0] in _GLOBAL_OPTIONS:
        rest = rest[1:] if "=" in rest[0] else rest[2:]
    return rest


def _run(words: list[str]) -> list[str]:
    if any(word.strip("\"'") in ("$@", "$*", "${@}", "${*}") for word in words):
        raise NoCounterpart("det-lightning run CONFIG DIR, by hand: callers may pass options unknown to det-lightning")
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
        elif name in _TEST_FLAGS:
            raise NoCounterpart("pytest --trial MODULE:CLASS --trial-config CONFIG, to try the trial")
        elif word.startswith("-") and word not in _DROPPED_FLAGS:
            raise NoCounterpart(f"det-lightning run CONFIG DIR, which has no option {name}")
        elif not word.startswith("-"):
            given.append(word)
    if len(given) not in (1, 2) or given[-1].endswith(".py") or "" in options:
        raise NoCounterpart("det-lightning run CONFIG DIR, with one configuration and the directory of the code")
    return ["det-lightning", "run", *given, *options]
