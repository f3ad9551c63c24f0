"""Output that appears whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upcycle.errors import OutputError


@contextmanager
def staged(output: Path, *, overwrite: bool = False, source: Path | None = None) -> Iterator[Path]:
    """A hidden sibling folder to write into; it takes the name `output` when the block succeeds.

    Files are fsynced before one atomic rename, so a folder of that name is always complete. What
    an interrupted run left behind is removed by the next one. When the block raises, nothing is
    left.

    Args:
        output: the folder to make.
        overwrite: replace an existing `output`, which stays whole until the new one is.
        source: a folder that `output` must not be, or lie in.

    Raises:
        OutputError: `output` exists, lies inside `source`, is being written by another process,
            or its parent cannot be written.
    """
    with _workspace(output, overwrite, source) as staging:
        yield staging
        sync_tree(staging)
        _publish(staging, output)


@contextmanager
def staged_entry(output: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Like `staged`, for one file or package made by someone else: yields the path to write to.

    Raises:
        OutputError: as for `staged`.
    """
    with _workspace(output, overwrite, None) as staging:
        entry = staging / output.name
        yield entry
        sync_tree(staging)
        _publish(entry, output)
        shutil.rmtree(staging)


@contextmanager
def _workspace(output: Path, overwrite: bool, source: Path | None) -> Iterator[Path]:
    """The hidden folder beside `output`, locked, empty, and gone again if the block raises."""
    check_output(output, overwrite=overwrite, source=source)
    staging = output.parent / f".{output.name}.partial"
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {output}: {error.strerror}",
            where=str(output.parent),
            fix="choose a folder that you may write to",
        ) from error
    with _locked(staging, output):
        _empty(staging)
        try:
            yield staging
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def check_output(output: Path, *, overwrite: bool = False, source: Path | None = None) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        OutputError: `output` exists without `overwrite`, or is or lies in `source`.
    """
    if source is not None:
        inside, outside = output.resolve(), source.resolve()
        if inside == outside or outside in inside.parents:
            raise OutputError(
                f"the output {output} lies inside the source {source}",
                where=str(inside),
                fix="name an output outside the source, which is only read",
            )
    if os.path.lexists(output) and not overwrite:
        raise OutputError(
            f"{output} exists",
            where=str(output.resolve()),
            fix="name another output, or pass --overwrite to replace it",
        )


def sync_tree(folder: Path) -> None:
    """Fsync every file and folder below `folder`, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink():
                _sync(path)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(staging: Path, output: Path) -> Iterator[None]:
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OutputError(
            f"another process is writing {output}",
            where=str(staging),
            fix="wait for it, or name another output",
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _publish(staged_path: Path, output: Path) -> None:
    """Rename onto `output`; a folder there already steps aside first and goes last."""
    aside = output.parent / f".{output.name}.replaced"
    if os.path.lexists(output):
        _remove(aside)
        os.rename(output, aside)
    os.rename(staged_path, output)
    _sync(output.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
