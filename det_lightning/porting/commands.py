"""Commands, in shell scripts, Dockerfiles and any text: of ``det`` and of launchers; Determined's variables and paths.

A command of ``det`` is a finding that names what to run instead; only the name of ``det experiment create`` and of
``det experiment list`` is replaced, where the arguments stay the same and nothing reads the output.
"""

from __future__ import annotations

import re

from det_lightning.porting.counterparts import counterpart, missing
from det_lightning.porting.findings import Finding, Need, Premise, Severity, line_at
from det_lightning.porting.requirements import port_installs
from det_lightning.startup_hook import is_accepted

_COMMENTS = re.compile(r"(^[ \t]*#[^\n]*\n?)", re.MULTILINE)
_IMAGE = re.compile(r"^[ \t]*(?:FROM\s+(?:--\S+\s+)*|ARG\s+\w+=)(\S*determinedai/\S+)", re.MULTILINE | re.IGNORECASE)
_PROGRAM = "port the code by hand, or keep it in a separate file"
# For a hook that no comment accepts.
_RUNS_HERE = "it runs in your own environment, not in a container; det-lightning run asks for --hook run or --hook skip"
_INSTALL_ONCE = (
    "install its packages once, in a virtual environment, and start with --hook skip; or accept the hook with the "
    "comment `# det-lightning: ok` in it: pip may replace torch itself by another release"
)
# Before a module in a command line, perhaps on the next line, or in a list of quoted words.
_MODULE_OPTION = r"-m[\"']?(?:\s*,\s*|(?:\s|\\\r?\n)*)"
# The inner group is the quote before the module's name.
_LAUNCH = re.compile(rf"({_MODULE_OPTION}([\"']?))determined\.launch\.(\w+)(?![\w.])")
_RUN_INSIDE = re.compile(
    rf"{_MODULE_OPTION}[\"']?(determined\.(?:exec|cli|deploy)[\w.]*)"
    r"(?:[\"'\s,\\]+(?:--trial[\"'\s,]+)?([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?=[\"'\s]|$))?"
)
_TRIAL = re.compile(
    r"(?:determined|det_lightning)\.launch\.(?:torch_distributed|\w*horovod)\b[^#;]{0,200}?"
    r"\s[\"']?(?:--trial[\"'\s,=]+)?(--trial\b|[A-Za-z_][\w.]*:[A-Za-z_]\w*(?=[\"'\s]|$))"
)
# Determined's variables of a task that neither `det-lightning run` nor a launcher sets.
_NOT_SET = {
    "DET_AGENT_ID", "DET_ALLOCATION_ID", "DET_CLUSTER_ID", "DET_CONTAINER_ID", "DET_INITIAL_WORKLOAD",
    "DET_INTER_NODE_NETWORK_INTERFACE", "DET_RENDEZVOUS_PORT", "DET_RENDEZVOUS_PORTS", "DET_RESOURCES_ID",
    "DET_TASK_ID", "DET_TRIAL_RUNNER_NETWORK_INTERFACE", "DET_TRIAL_UNIQUE_PORT_OFFSET", "DET_UNIQUE_PORT_OFFSET",
    "DET_USE_GPU", "DET_WORKLOAD_MANAGER_TYPE",
}  # fmt: skip
# Variables for Determined's own tools, without effect here.
_READ_BY_DETERMINED = {
    "DET_MASTER", "DET_MASTER_ADDR", "DET_MASTER_CERT_FILE", "DET_MASTER_CERT_NAME", "DET_MASTER_PORT", "DET_PASS",
    "DET_PASSWORD", "DET_SESSION_TOKEN", "DET_USER", "DET_USERNAME", "DET_USER_TOKEN",
}  # fmt: skip
#: Python in commands.
IMPORTED = re.compile(r"(?:\b|\\n)(from\s+(?:determined|pedl)[\w.]*\s+import|import\s+(?:determined|pedl)[\w.]*(?!-))")
_IN_CONTAINERS = re.compile(r"(?<![\w.~/-])/run/determined/[\w./-]+")
# A word of a shell command; no redirection like 2>&1; ${{ }} is an expression of GitHub Actions.
_WORD = r"(?!\d*[<>])(?:\\[^\r\n]|\"[^\"\n]*\"|'[^'\n]*'|\$\([^)\n]*\)|\$\{\{[^}\n]*\}\}|[^\s;&|<>#`)\"'\\])+"
_GAP = r"(?:[ \t]|\\\r?\n)+"
# A line of a Makefile may begin with a sign.
_DET = re.compile(
    rf"(?P<before>^[\t@+-]*|[\s;&|(`@!\"'])(?P<program>(?:[^\s;&|<>#`()@!\"'\\]{{0,200}}/bin/)?det"
    rf"(?:{_GAP}(?:--master|--user|-m|-u)(?:=|{_GAP}){_WORD})*{_GAP}(?P<command>[a-z][\w-]*(?:{_GAP}[a-z][\w-]*)?))"
    rf"(?![\w.-])(?P<rest>(?:{_GAP}{_WORD})*)",
    re.MULTILINE,
)
# By command of `det`, with its short names: what to run instead. Most name an experiment by number.
_DET_COMMANDS = {
    r"(experiment|exp|e) create": "det-lightning run CONFIG DIR",
    r"(experiment|exp|e) (list|ls)": "det-lightning experiment ls",
    r"(experiment|exp|e) (describe|list-trials|lt)|(trial|t) describe": (
        "det-lightning experiment show EXPERIMENT, with its directory"
    ),
    r"(experiment|exp|e|trial|t) logs": "det-lightning experiment logs EXPERIMENT TRIAL, with its directory",
    r"(experiment|exp|e) (pause|cancel|kill)": "det-lightning experiment stop EXPERIMENT, with its directory",
    r"(experiment|exp|e) (activate|continue)": "det-lightning experiment resume EXPERIMENT, with its directory",
    r"(experiment|exp|e) (list-checkpoints|lc)|(checkpoint|c) list": "det-lightning checkpoint ls STORAGE",
    r"(checkpoint|c) describe": "det-lightning checkpoint show CHECKPOINT",
    r"(experiment|exp|e|trial|t|checkpoint|c) download": "det-lightning checkpoint export STORAGE",
    r"(checkpoint|c) rm": "det-lightning checkpoint prune STORAGE",
    r"(experiment|exp|e) wait": "nothing, since det-lightning run returns at the end of the experiment",
    r"preview-search( .*)?": "det-lightning run CONFIG --dry-run",
    r"tensorboard start": "tensorboard --logdir experiments",
}
# The counterparts with the same arguments.
_RENAMED = {
    "det-lightning run CONFIG DIR": "det-lightning run",
    "det-lightning experiment ls": "det-lightning experiment ls",
}
# Other commands, which need a cluster. "det model" and "det task" may be plain text, so a common verb must follow.
_OF_CLUSTER = re.compile(
    r"version|(experiment|exp|e|trial|t|checkpoint|cp|c|agent|a|auth|cmd|command|config-policies|deploy|d|job|j|master|m|"
    r"model|notebook|project|p|rbac|resources|res|resource-pool|rp|shell|slot|s|task|template|tpl|tensorboard|tkn|token|"
    r"user|u|user-group|workspace|w) "
    r"(add|archive|aws|cleanup-logs|config|create|delete|describe|disable|download|edit|enable|gcp|info|kill|label|list|"
    r"list-versions|local|login|logout|logs|ls|move|open|register|register-version|rename|run|set|show|start|unarchive|"
    r"update|wait|whoami)"
)
# Readers of a command's output: a pipe behind the command, and substitutions around it.
_READS = re.compile(r"[ \t]*(?:2>&1[ \t]*)?\|(?!\|)")
_READS_AROUND = re.compile(r"(?:\$\(|`|=[ \t]*!)[ \t]*$")
_IN_COMMENT = re.compile(r"(?:^|\s)#")
_OTHER_ARGUMENTS = re.compile(r"\s-(?!-config[=\s])|\$[@*]|\$\{[@*]\}")
_VARIABLE = re.compile(r"(?<![\w.-])DET_(?!LIGHTNING_)[A-Z][A-Z0-9_]*(?!\w)")
_IS_SET = re.compile(r"\s*[=:](?!=)")


def note_variables(text: str, first_line: int) -> list[Finding]:
    """Return a finding for each of Determined's variables in a text that ``det-lightning run`` does not set."""
    findings = []
    for found in _VARIABLE.finditer(text):
        is_of_tools = (name := found.group()) in _READ_BY_DETERMINED
        if is_of_tools or (name in _NOT_SET and not _IS_SET.match(text, found.end())):
            premise = Premise.unneeded if is_of_tools else Premise.nothing
            advice = (
                "remove it" if is_of_tools else "set it in environment.environment_variables, then accept this line"
            )
            line = line_at(text, found.start(), first_line)
            reason = f"{name}: det-lightning run does not set it"
            findings.append(Finding(line, Severity.check, reason, advice, premise=premise))
    return findings


def note_container_paths(text: str, first_line: int) -> list[Finding]:
    """Return a finding for each path in a text that exists in Determined's containers only."""
    advice = "write a path of this machine: a trial runs in a directory with a copy of its code"
    paths = [(line_at(text, found.start(), first_line), found.group()) for found in _IN_CONTAINERS.finditer(text)]
    return [Finding(at, Severity.check, f"{path} exists in Determined's containers only", advice) for at, path in paths]


def launcher_counterpart(module: str) -> tuple[str, ...] | None:
    """Return the replacement of ``determined.launch.<module>`` after ``-m``, word by word, or None."""
    if module in ("autohorovod", "auto_horovod"):
        return ("det_lightning.launch.horovod", "--autohorovod")
    ours = counterpart(f"determined.launch.{module}")
    return None if ours is None else (ours,)


def missing_launcher(module: str, line: int) -> Finding:
    """Return the finding for a command with ``determined.launch.<module>``, a launcher without counterpart.

    A script for DeepSpeed's launcher can be moved by changing the command to another launcher.
    """
    need = Need.nothing if module == "deepspeed" else Need.file
    return missing(f"determined.launch.{module}", line, need)


def port_commands(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return a text with the launch layers of all commands rewritten, and findings for the rest."""
    findings = []
    for found in _TRIAL.finditer(text):
        findings.append(runs_a_class(found.group(1), line_at(text, found.start(1), first_line)))
    for found in _RUN_INSIDE.finditer(text):
        module, trial = found.groups()
        line = line_at(text, found.start(1 if trial is None else 2), first_line)
        reason = f"{module}: it needs a Determined master"
        inside = Finding(line, Severity.problem, reason, "remove it", Need.file)
        findings.append(inside if trial is None else runs_a_class(trial, line))

    def replace(match: re.Match[str]) -> str:
        before, quote, module = match.groups()
        words = launcher_counterpart(module)
        if words is None:
            findings.append(missing_launcher(module, line_at(text, match.start(3), first_line)))
            return match.group()
        return before + (f"{quote}, {quote}" if quote else " ").join(words)

    return _LAUNCH.sub(replace, text), findings


def find_trial_class(words: list[str]) -> str | None:
    """Return the trial class run by a launcher in a command, or None. The command is given as words."""
    command = " ".join(words)
    launched = _TRIAL.search(command)
    inside = _RUN_INSIDE.search(command)
    return (launched and launched.group(1)) or (inside and inside.group(2)) or None


#: Advice for a command in which a launcher runs a trial class.
RUN_AN_EXPERIMENT = (
    "name the class as the entrypoint of an experiment configuration, and start det-lightning run CONFIG; or write a "
    "script that calls det_lightning.pytorch.init() and Trainer(...).fit(...), and run it here"
)


def runs_a_class(given: str, line: int) -> Finding:
    """Return the finding for a command in which a launcher runs a trial class."""
    reason = f"{given}: the launchers of det_lightning run classes in experiments only"
    return Finding(line, Severity.problem, reason, RUN_AN_EXPERIMENT)


# The program det


def find_counterpart(command: str) -> str | None:
    """Return what to run instead of a command of ``det``, given without the program's name, or None."""
    return next((ours for theirs, ours in _DET_COMMANDS.items() if re.fullmatch(theirs, command)), None)


def port_det_commands(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with ``det`` renamed where the arguments stay the same, and findings for other commands."""
    findings = []

    def rename(found: re.Match[str]) -> str:
        begin = text.rfind("\n", 0, found.start("program")) + 1
        around = text[begin : found.start("program")]
        if _IN_COMMENT.search(around):
            return found.group()
        ours = _RENAMED.get(find_counterpart(_join(found["command"])) or "")
        is_read = _READS.match(text, found.end()) or _READS_AROUND.search(around)
        if ours and not is_read and not _OTHER_ARGUMENTS.search(found["rest"]):
            return f"{found['before']}{ours}{found['rest']}"
        findings.extend(_note_det_command(found, line_at(text, found.start("program"), first_line), Need.file))
        return found.group()

    return _DET.sub(rename, text), findings


def note_det_commands(text: str, first_line: int) -> list[Finding]:
    """Return a finding for each command of ``det`` that a program starts."""
    found = [(line_at(text, one.start("program"), first_line), one) for one in _DET.finditer(text)]
    return [finding for line, one in found for finding in _note_det_command(one, line, Need.script)]


def _note_det_command(found: re.Match[str], line: int, need: Need) -> list[Finding]:
    name = _join(found["program"])
    if ours := find_counterpart(_join(found["command"])):
        return [Finding(line, Severity.problem, f"{name}: it talks to a Determined master", f"in its place: {ours}")]
    if _OF_CLUSTER.fullmatch(_join(found["command"])):
        advice = "remove it, or keep it for as long as there is a master"
        return [Finding(line, Severity.problem, f"{name}: it needs a Determined master", advice, need)]
    return []


def _join(words: str) -> str:
    return " ".join(words.replace("\\", " ").split())


# Files


def port_shell(text: str, first_line: int = 1) -> tuple[str, list[Finding]]:
    """Return shell commands with launch layers and packages rewritten, and findings for the rest. Comments stay."""
    findings: list[Finding] = []
    written = []
    line = first_line
    for number, part in enumerate(_COMMENTS.split(text)):
        written.append(part if number % 2 else _port_part(part, line, findings))
        line += part.count("\n")
    return "".join(written), findings


def _port_part(part: str, line: int, findings: list[Finding]) -> str:
    ported, launched = port_commands(part, line)
    ported, left = port_det_commands(ported, line)
    ported, packages = port_installs(ported, line)
    # Variables in options of det go with the options.
    variables = [found for found in note_variables(part, line) if found.reason.partition(":")[0] in ported]
    paths = note_container_paths(part, line)
    programs = [
        Finding(line_at(part, found.start(1), line), Severity.problem, f"Python in a command: {found[1]}", _PROGRAM)
        for found in IMPORTED.finditer(part)
    ]
    findings.extend([*launched, *left, *packages, *variables, *paths, *programs])
    return ported


def port_dockerfile(text: str) -> tuple[str, list[Finding]]:
    """Return a Dockerfile with launch layers and installed packages rewritten, and findings for the rest."""
    ported, findings = port_shell(text)
    for found in _IMAGE.finditer(text):
        reason = f"{found.group(1)} brings Determined's environment, with an old torch"
        advice = "build on an image with Python 3.10 or later, and let pip install det-lightning, which brings torch"
        findings.append(Finding(line_at(text, found.start(1)), Severity.check, reason, advice))
    return ported, findings


def port_startup_hook(text: str) -> tuple[str, list[Finding]]:
    """Port ``startup-hook.sh`` like :func:`port_shell`; one finding for the whole file, unless a comment accepts it.

    Determined ran the hook in the container of a trial; ``det-lightning run`` runs the hook on the machine.
    """
    ported, findings = port_shell(text)
    return ported, findings if is_accepted(text) else [*findings, Finding(0, Severity.check, _RUNS_HERE, _INSTALL_ONCE)]
