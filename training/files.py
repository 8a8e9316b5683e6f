"""Files that are never half written, or say so."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import polars as pl

from model.bundle import fsync


def write_parquet(table: pl.DataFrame, path: Path) -> None:
    """Write a table to a file that counts only once something names it.

    Raises:
        OSError: it cannot be written; what is there of it is for whoever owns the folder to remove. polars has an error
            of its own for a full disk.
    """
    try:
        table.write_parquet(path)
    except pl.exceptions.ComputeError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def write_whole(path: Path, data: bytes | IO[bytes]) -> None:
    """Write `data`, or what is left of an open file, to `path` in one step: a reader sees the old file or the new one.

    A temporary file in the same folder is written, fsynced and renamed; missing folders are made.

    Raises:
        OSError: the folder cannot be made or written; `path` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                shutil.copyfileobj(data, file)
            file.flush()
            os.fchmod(file.fileno(), 0o644)  # mkstemp's is for one user alone
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    # Without it a power cut may forget the rename although the file's bytes are on the disk.
    fsync(path.parent)
