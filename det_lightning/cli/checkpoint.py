"""The commands of ``det-lightning checkpoint``: their arguments. Each imports what it does when it is called."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from det_lightning.cli.arguments import (
    EXIT_CODES,
    TYPER_SETTINGS,
    Checkpoint,
    JsonFlag,
    Options,
    Storage,
    TrustedFlag,
    parse_options,
)
from det_lightning.cli.output import report_errors

__all__ = ["app"]

app = typer.Typer(help="Look at checkpoints, convert and delete them.", epilog=EXIT_CODES, **TYPER_SETTINGS)


class ExportKind(str, enum.Enum):
    """What ``export`` writes."""

    weights = "weights"
    safetensors = "safetensors"
    lightning = "lightning"


@app.command("ls", epilog=EXIT_CODES)
def list_(storage: Storage, option: Options = None, json: JsonFlag = False) -> None:
    """List the checkpoints of a storage, the newest first; incomplete ones too."""
    with report_errors():
        from det_lightning.cli.listing import list_checkpoints

        list_checkpoints(storage, parse_options(option), json)


@app.command(epilog=EXIT_CODES)
def show(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="Name every tensor.")] = False,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Tell what is inside of a checkpoint, without running anything of it."""
    with report_errors():
        from det_lightning.cli.showing import show_checkpoint

        if not show_checkpoint(checkpoint, parse_options(option), trusted, tensors, json):
            raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def verify(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT_OR_STORAGE...",
            help="Paths or URLs; of a storage all checkpoints are verified.",
            show_default=False,
        ),
    ],
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Find out whether checkpoints are complete, undamaged and safe to read."""
    with report_errors():
        from det_lightning.cli.verifying import verify_checkpoints

        if not verify_checkpoints(places, parse_options(option), trusted, json):
            raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def export(
    checkpoint: Checkpoint,
    to: Annotated[
        ExportKind,
        typer.Option(
            help="weights: a state dict for torch.load; safetensors: the same without pickle; lightning: a .ckpt that "
            "pl.Trainer.fit(TrialModule(...), ckpt_path=...) goes on from. With several models the names of weights "
            "begin with models.<index>.",
            show_default=False,
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Write a checkpoint as a single file that other programs read."""
    with report_errors():
        from det_lightning.cli.converting import export_checkpoint

        export_checkpoint(checkpoint, parse_options(option), to.value, output, force, trusted, json)


@app.command("import", epilog=EXIT_CODES)
def import_(
    file: Annotated[str, typer.Argument(help="Path or URL of a .ckpt file of Lightning's.", show_default=False)],
    storage: Storage,
    any_module: Annotated[
        bool,
        typer.Option(
            "--any-module",
            help="Take the file of a LightningModule that is no TrialModule: its weights, as those of one model, and "
            "its optimizers and schedulers.",
        ),
    ] = False,
    trusted: TrustedFlag = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Write a .ckpt file as a new checkpoint in Determined's format, without code, and print its id."""
    with report_errors():
        from det_lightning.cli.converting import import_checkpoint

        import_checkpoint(file, storage, parse_options(option), any_module, trusted, json)


@app.command(epilog=EXIT_CODES)
def prune(
    storage: Storage,
    experiment_best: Annotated[int, typer.Option(help="Keep so many of each experiment's best.")] = 0,
    trial_best: Annotated[int, typer.Option(help="Keep so many of each trial's best.")] = 1,
    trial_latest: Annotated[int, typer.Option(help="Keep so many of each trial's latest.")] = 1,
    incomplete: Annotated[
        bool,
        typer.Option("--incomplete", help="Delete those too that were never finished, and are older than an hour."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Delete the checkpoints that need not be kept, by Determined's rule.

    The rule needs to know metrics and trials, which a run with retention notes beside its checkpoints. Others are left
    alone. Do not use it on the storage of a trial that is running.
    """
    with report_errors():
        from det_lightning.checkpoint.retention.rule import Retention
        from det_lightning.cli.pruning import prune_storage

        retention = Retention(experiment_best, trial_best, trial_latest)
        prune_storage(storage, parse_options(option), retention, incomplete, dry_run, yes, json)
