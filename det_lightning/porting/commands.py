"""Shell commands in scripts, hooks and Dockerfiles: launch layers, packages, variables, and the program ``det``."""

from __future__ import annotations

import re

from det_lightning.porting.counterparts import counterpart, missing
from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at
from det_lightning.porting.requirements import port_installs, useless_installs

# Before a module in a command line, also on the line after it, or in a list of quoted words.
_MODULE_OPTION = r"-m[\"']?(?:\s*,\s*|(?:\s|\\\r?\n)*)"
# The quote is that before the module's name.
_LAUNCH = re.compile(rf"({_MODULE_OPTION}([\"']?))determined\.launch\.(\w+)(?![\w.])")
_RUN_INSIDE = re.compile(
    rf"{_MODULE_OPTION}[\"']?(determined\.(?:exec|cli|deploy)[\w.]*)"
    r"(?:[\"'\s,\\]+(?:--trial[\"'\s,]+)?([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?=[\"'\s]|$))?"
)
_TRIAL = re.compile(
    r"(?:determined|det_lightning)\.launch\.(?:torch_distributed|\w*horovod)\b[^#;]{0,200}?"
    r"\s[\"']?(?:--trial[\"'\s,=]+)?(--trial\b|[A-Za-z_][\w.]*:[A-Za-z_]\w*(?=[\"'\s]|$))"
)
_COMMENT = re.compile(r"(^[ \t]*#[^\n]*\n?)", re.MULTILINE)
_IMAGE = re.compile(r"^[ \t]*(?:FROM\s+(?:--\S+\s+)*|ARG\s+\w+=)(\S*determinedai/\S+)", re.MULTILINE | re.IGNORECASE)
_INSTALLER = re.compile(
    r"^[^#\n]*?\b(?:(?P<tool>pip3?|conda|mamba|apt|apt-get|yum|dnf|apk)\s+(?:-\S+\s+)*(?:install|add))\b", re.MULTILINE
)
# Of those that Determined sets for a task, what `det-lightning run` or, as DET_CHIEF_IP, its launcher sets too.
_SET_HERE = {
    "DET_CHIEF_IP", "DET_EXPERIMENT_CONFIG", "DET_EXPERIMENT_ID", "DET_HPARAMS", "DET_LATEST_CHECKPOINT",
    "DET_SLOT_IDS", "DET_STEPS_COMPLETED", "DET_TASK_TYPE", "DET_TRIAL_ID", "DET_TRIAL_RUN_ID", "DET_TRIAL_SEED",
}  # fmt: skip
# What a project may set for Determined's own tools, which has no effect here.
_READ_BY_DETERMINED = {
    "DET_MASTER", "DET_MASTER_ADDR", "DET_MASTER_CERT_FILE", "DET_MASTER_CERT_NAME", "DET_MASTER_PORT", "DET_PASS",
    "DET_SESSION_TOKEN", "DET_USER", "DET_USER_TOKEN",
}  # fmt: skip
_VARIABLE = re.compile(r"(?<![\w.-])DET_(?!LIGHTNING_)[A-Z][A-Z0-9_]*(?!\w)")


def note_variables(text: str, first_line: int) -> list[Finding]:
    """Return a finding for each variable of Determined in a text that ``det-lightning run`` does not set."""
    findings = []
    for found in _VARIABLE.finditer(text):
        name = found.group()
        if name not in _SET_HERE:
            premise = Premise.nothing if name in _READ_BY_DETERMINED else Premise.variable_unset
            reason = f"{name}: det-lightning run does not set it"
            advice = "remove it, or set it yourself, as in environment.environment_variables"
            line = line_at(text, found.start(), first_line)
            findings.append(Finding(line, Severity.check, reason, advice, premise=premise))
    return findings


def launcher_counterpart(module: str) -> tuple[str, ...] | None:
    """Return the words that replace ``determined.launch.<module>`` after ``-m``; None if nothing does."""
    if module in ("autohorovod", "auto_horovod"):
        return ("det_lightning.launch.horovod", "--autohorovod")
    ours = counterpart(f"determined.launch.{module}")
    return None if ours is None else (ours,)


def missing_launcher(module: str, line: int) -> Finding:
    """Return the finding for a command that starts ``determined.launch.<module>``, which nothing replaces.

    What DeepSpeed's launcher starts need not stay with it: another launcher can start it once the command is changed.
    """
    need = Need.nothing if module == "deepspeed" else Need.file
    return missing(f"determined.launch.{module}", line, need)


def port_commands(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return any text with the launch layers of the commands in it rewritten, and what could not be."""
    findings = []
    for found in _TRIAL.finditer(text):
        findings.append(runs_a_class(found.group(1), line_at(text, found.start(1), first_line)))
    for found in _RUN_INSIDE.finditer(text):
        module, trial = found.groups()
        line = line_at(text, found.start(1 if trial is None else 2), first_line)
        reason = f"{module}: it needs a Determined master"
        inside = Finding(line, Severity.problem, reason, "remove it", Need.file)
        findings.append(inside if trial is None else runs_a_class(trial, line))

    def replaced(match: re.Match[str]) -> str:
        before, quote, module = match.groups()
        words = launcher_counterpart(module)
        if words is None:
            findings.append(missing_launcher(module, line_at(text, match.start(3), first_line)))
            return match.group()
        return before + (f"{quote}, {quote}" if quote else " ").join(words)

    return _LAUNCH.sub(replaced, text), findings


def trial_class_in(words: list[str]) -> str | None:
    """Return the trial class that a command, given as words, has a launcher run; None if there is none."""
    command = " ".join(words)
    launched = _TRIAL.search(command)
    inside = _RUN_INSIDE.search(command)
    return (launched and launched.group(1)) or (inside and inside.group(2)) or None


#: What to do about a command that has a launcher run a trial class.
RUN_AN_EXPERIMENT = (
    "name the class as the entrypoint of an experiment configuration, and start det-lightning run CONFIG; or write a "
    "script that calls det_lightning.pytorch.init() and Trainer(...).fit(...), and run it here"
)


def runs_a_class(given: str, line: int) -> Finding:
    """Return the finding for a command that has a launcher run a trial class."""
    reason = f"{given}: the launchers of det_lightning run classes in experiments only"
    return Finding(line, Severity.problem, reason, RUN_AN_EXPERIMENT)


def port_shell(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with launch layers and packages rewritten, except in comments, and what is left."""
    findings = []
    parts = _COMMENT.split(text)
    line = first_line
    for index, part in enumerate(parts):
        if index % 2 == 0:  # between two comments
            ported, launched = port_commands(part, line)
            ported, left = port_det_commands(ported, line)
            findings += [*launched, *left, *useless_installs(part, line), *note_variables(part, line)]
            parts[index] = port_installs(ported)
        line += part.count("\n")
    return "".join(parts), findings


def port_dockerfile(text: str) -> tuple[str, list[Finding]]:
    """Return a Dockerfile with launch layers and installed packages rewritten, and what could not be."""
    ported, findings = port_shell(text)
    for found in _IMAGE.finditer(text):
        reason = f"{found.group(1)} brings Determined's environment, with an old torch"
        advice = "build on an image with Python 3.10 or later, and let pip install det-lightning, which brings torch"
        findings.append(Finding(line_at(text, found.start(1)), Severity.check, reason, advice))
    return ported, findings


def port_startup_hook(text: str) -> tuple[str, list[Finding]]:
    """Return ``startup-hook.sh`` as :func:`port_shell` does, with one finding if it installs packages.

    Determined ran it in the container of a trial, and ``det-lightning run`` does on the machine.
    """
    ported, findings = port_shell(text)
    found = _INSTALLER.search(text)
    if found is not None:
        reason = f"{found['tool']} installs here, without a container, whenever det-lightning run starts a trial"
        advice = (
            "install the packages once, in a virtual environment of the project, and remove such lines: pip may "
            "replace torch itself by another release"
        )
        findings.append(Finding(line_at(text, found.start("tool")), Severity.check, reason, advice))
    return ported, findings


# The program ``det``, and what replaces its commands


# No redirection, such as 2>&1; ${{ }} is an expression of GitHub Actions.
_WORD = r"(?!\d*[<>])(?:\\[^\r\n]|\"[^\"\n]*\"|'[^'\n]*'|\$\([^)\n]*\)|\$\{\{[^}\n]*\}\}|[^\s;&|<>#`)\"'\\])+"
_GAP = r"(?:[ \t]|\\\r?\n)+"
# A line of a Makefile may begin with a sign.
_BEFORE = r"(?P<before>^[\t@+-]*|[\s;&|(`@!\"'])"
_COMMAND = re.compile(rf"{_BEFORE}(?P<command>det(?={_GAP}[\w-])(?:{_GAP}{_WORD})+)", re.MULTILINE)
_WORDS = re.compile(_WORD)
# What reads the output of a command: what it is passed on to, or what is before it.
_READ_BY = re.compile(r"[ \t]*(?:2>&1[ \t]*)?\|[ \t]*(?:[ef]?grep|g?awk|cut|jq|perl|python3?|sed|tr|xargs)\b")
_IN_COMMENT = re.compile(r"(?:^|\s)#")
_READ_IN = re.compile(r"(?:\$\(|`|=[ \t]*!)[ \t]*$")

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
    "det-lightning checkpoint export STORAGE": ("trial download", "checkpoint download"),
    "det-lightning checkpoint prune STORAGE": ("checkpoint rm",),
    "tensorboard --logdir experiments": ("tensorboard start",),
}  # fmt: skip


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
    command = " ".join([group, *rest[:1]])
    raise NoCounterpart(next((instead for instead, commands in _INSTEAD.items() if command in commands), _KEEP))


def port_det_commands(text: str, first_line: int = 1, is_read: bool = False) -> tuple[str, list[Finding]]:
    """Return shell commands with those of ``det`` translated, and findings for those that cannot be.

    If their output ``is_read`` by whatever runs them, it is a finding, too; otherwise only where the commands show it.
    """
    findings = []

    def replaced(found: re.Match[str]) -> str:
        words = _WORDS.findall(found["command"].replace("\\\n", " ").replace("\\\r\n", " "))
        begin = text.rfind("\n", 0, found.start("command")) + 1
        if not is_det_command(words) or _IN_COMMENT.search(text, begin, found.start("command")):
            return found.group()
        line = line_at(text, found.start("command"), first_line)
        try:
            new = translated(words)
        except NoCounterpart as e:
            findings.append(needs_a_master(words, str(e), line))
            return found.group()
        if is_read or _READ_BY.match(text, found.end()) or _READ_IN.search(text, begin, found.start("command")):
            findings.append(prints_something_else(words, line))
        return found["before"] + " ".join(new)

    return _COMMAND.sub(replaced, text), findings


def needs_a_master(words: list[str], advice: str, line: int, need: Need = Need.file) -> Finding:
    """Return the finding for a command of ``det`` that stays."""
    return Finding(line, Severity.problem, f"{_short(words)}: it needs a Determined master", advice, need)


def prints_something_else(words: list[str], line: int) -> Finding:
    """Return the finding for a translated command whose output is read."""
    reason = f"{_short(words)}: its output is read, and that of the command in its place is another one"
    advice = "det-lightning experiment ls --json lists experiments; det-lightning run returns when its one is over"
    return Finding(line, Severity.check, reason, advice, premise=Premise.changed)


def _short(words: list[str]) -> str:
    return " ".join(words[: len(words) - len(_without_global_options(words)) + 2])


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
