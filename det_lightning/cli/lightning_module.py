"""``det-lightning port --to lightning``: a trial, written as a LightningModule."""

from __future__ import annotations

import pathlib
import sys

import libcst

from det_lightning.cli.output import warn
from det_lightning.porting.separate_process import PortingFailed, PortingProcess
from det_lightning.porting.to_lightning import NoTrialError, write_module

__all__ = ["write_lightning_module"]


def write_lightning_module(paths: list[pathlib.Path], output: pathlib.Path | None, force: bool) -> None:
    """Write the trial of a file as a LightningModule, to another file or to the standard output.

    Raises:
        ValueError: it can not be written so, or there is a file already.
    """
    if len(paths) != 1:
        raise ValueError(f"--to lightning takes one file with one trial; got {len(paths)} paths.")
    (path,) = paths
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with PortingProcess() as process:
            process.port(path)  # a file that would crash this process crashes that one
        written, todos = write_module(path.read_text(encoding="utf-8-sig"))
    except (PortingFailed, RecursionError) as e:
        raise ValueError(f"{path} can not be read: {e}.") from e
    except libcst.ParserSyntaxError as e:
        raise ValueError(f"{path} is no Python 3: line {e.raw_line}: {e.message}.") from e
    except NoTrialError as e:
        raise ValueError(f"{path} can not be written as a LightningModule: {e}.") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not encoded as UTF-8.") from e
    if output is None:
        sys.stdout.write(written)
    else:
        _write(output, written, force)
    warn(f"{todos} TODO comment{'' if todos == 1 else 's'} to look at." if todos else "Nothing is left to do.")


def _write(output: pathlib.Path, written: str, force: bool) -> None:
    if output.is_symlink():
        raise ValueError(f"{output} is a link to {output.resolve()}; name that file itself.")
    if output.exists() and not force:
        raise ValueError(f"{output} exists; --force replaces it.")
    output.write_text(written, encoding="utf-8")
