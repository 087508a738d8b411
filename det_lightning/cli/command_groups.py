"""The layout of help texts, and hints after an unknown command."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from det_lightning.escaping import make_safe
from det_lightning.masking import find_option_secrets, mask_text

# Newer releases of Typer contain a copy of click, so this class has no name common to all releases.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


class Command(TyperCommand):
    """A command whose help fits the terminal, and shows no types for arguments and flags."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        # Typer keeps the line breaks of a docstring after the first paragraph.
        super().__init__(*args, help=help and re.sub(r"(?<!\n)\n(?!\n)", " ", help), **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(one.metavar if one.required else f"[{one.metavar}]" for one in arguments)]


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.metavar = parameter.metavar or parameter.name.upper()
            parameter.display_type_rich = lambda ctx: None  # the column of newer releases of Typer
    return parameters


class CommandGroup(TyperGroup):
    """A group that answers an unknown command with similar ones, or with the counterpart of a command of Determined."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as e:
            group = [] if ctx.parent is None else [str(ctx.info_name)]
            said = e.format_message()
            hint = _describe_counterpart([*group, *args])
            if not hint and "Did you mean" not in said:  # Typer looks in this group only
                hint = _commands_like(args[0], ctx.find_root().command.commands)
            raise _UsageError(f"{said}{hint}", ctx=ctx) from None


def _commands_like(name: str, commands: Mapping[str, Any]) -> str:
    """Return a hint at commands of any group with the same or a similar name."""
    by_path = {path: path for path in commands}
    for group, content in commands.items():
        by_path |= {f"{group} {member}": member for member in getattr(content, "commands", {})}
    similar = difflib.get_close_matches(name, by_path.values(), n=len(by_path))
    exact = [path for path, last in by_path.items() if last == name]
    found = exact or [path for path, last in by_path.items() if last in similar]
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


def _describe_counterpart(arguments: list[str]) -> str:
    from det_lightning.porting.commands import find_counterpart

    command = " ".join(arguments[:2])
    instead = find_counterpart(command)
    return "" if instead is None else f" In place of det {command}: {instead}."


class MaskingGroup(CommandGroup):
    """The program's commands; messages about wrong arguments show neither secrets nor unprintable characters."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        given = list(args)
        with _make_usage_errors_safe(given):
            context = super().make_context(info_name, args, parent, **extra)
        context.obj = given
        return context

    def invoke(self, ctx: Any) -> Any:
        with _make_usage_errors_safe(ctx.obj):
            return super().invoke(ctx)


@contextlib.contextmanager
def _make_usage_errors_safe(arguments: list[str]) -> Iterator[None]:
    try:
        yield
    except _UsageError as e:
        message = e.format_message()
        options = dict(one.partition("=")[::2] for one in arguments)
        safe = make_safe(mask_text(message, find_option_secrets([arguments, options])))
        if safe == message:
            raise
        raise _UsageError(safe, ctx=e.ctx) from None
