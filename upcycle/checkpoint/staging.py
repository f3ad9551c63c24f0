"""Output that appears whole or not at all."""

import errno
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp

from safetensors import SafetensorError

from upcycle import stopping
from upcycle.checkpoint.manifest import made_here
from upcycle.errors import OutputError
from upcycle.utf8 import shown

_PACKAGES = (".mlpackage", ".aimodel")  # folders that pass for files
_LONGEST_NAME = 255  # bytes, on every file system in use
REFUSALS = {
    errno.EACCES, errno.EBUSY, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO,
    errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


@contextmanager
def staged(
    output: Path, *, overwrite: bool = False, inputs: Iterable[Path] = (), resume: bool = False
) -> Iterator[Path]:
    """A hidden sibling folder to write into; it takes the name `output` when the block succeeds.

    Files are fsynced before one atomic rename, so a folder of that name is always complete. What
    an interrupted run left behind is removed by the next one, and when the block raises, nothing
    is left: unless the work can be resumed. The modes of what was written follow the umask.

    Args:
        output: the folder to make.
        overwrite: replace an `output` that was made here before; it stays whole until then.
        inputs: what the output is made from, which it must neither lie in nor contain.
        resume: yield the folder with what an interrupted run left in it, and leave it when the
            block raises; the block clears what it does not use.

    Raises:
        OutputError: as for `check_output`; or `output` is being written by another process, or
            cannot be written.
    """
    with _workspace(output, overwrite, inputs, resume) as staging:
        yield staging
        _publish(staging, staging, output, overwrite)


@contextmanager
def staged_entry(
    output: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Like `staged`, for one file or package made by someone else: yields the path to write to.

    Raises:
        OutputError: as for `staged`.
    """
    with _workspace(output, overwrite, inputs) as staging:
        entry = staging / output.name
        yield entry
        _publish(staging, entry, output, overwrite)
        shutil.rmtree(staging)


def write_file(path: Path, text: str) -> None:
    """Write a small file whole or not at all, over an older one; missing folders are made.

    What is no plain file, such as `/dev/stdout`, is written to. What UTF-8 cannot hold is written
    as `shown` has it.

    Raises:
        OutputError: it cannot be written there.
    """
    text = shown(text)
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        whole = path.resolve()  # what a link leads to is written anew, not the link
        whole.parent.mkdir(parents=True, exist_ok=True)
        partial = whole.with_name(f".{whole.name}.partial")
        partial.unlink(missing_ok=True)
        try:
            with (
                stopping.cleanup(lambda: partial.unlink(missing_ok=True)),
                partial.open("x", encoding="utf-8") as file,
            ):
                file.write(text)
                file.flush()
                sync(partial)
                partial.replace(whole)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder, which is gone afterwards and after a signal too.

    Args:
        parent: where it lies; None means the system's folder for temporary files.
    """
    with ExitStack() as stack:
        with stopping.shielded():
            folder = Path(mkdtemp(prefix="upcycle-", dir=parent))
            stack.enter_context(stopping.cleanup(lambda: stopping.remove_folder(folder)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def staging_folder(output: Path) -> Path:
    """The hidden folder in which an output is made."""
    return output.parent / f".{output.name}.partial"


@contextmanager
def _workspace(
    output: Path, overwrite: bool, inputs: Iterable[Path], resume: bool = False
) -> Iterator[Path]:
    """The hidden folder beside `output`, locked, empty, and gone again if the block raises.

    With `resume` it is neither emptied nor removed.
    """
    check_output(output, overwrite=overwrite, inputs=inputs)
    staging = staging_folder(output)
    with writing(output, only=REFUSALS), ExitStack() as stack:
        with stopping.shielded():
            with writing(output):
                staging.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(staging, output))
            if not (resume or stopping.is_resumable()):
                stack.enter_context(stopping.cleanup(lambda: stopping.remove_folder(staging)))
        if not resume:
            clear(staging)
        try:
            yield staging
        except BaseException:
            if not resume:
                shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def writing(output: Path, *, only: Container[int] | None = None) -> Iterator[None]:
    """Turn what the file system refuses into an error that the user can mend.

    Args:
        output: what is being written.
        only: the error numbers that are the file system's refusals; all where None, which suits a
            block that does nothing but write.

    Raises:
        OutputError: the block raised such an OSError, or safetensors' own error of one.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number is None or (only is not None and number not in only):
            raise
        raise OutputError(
            f"cannot write {output}: {os.strerror(number)}",
            where=str(getattr(error, "filename", None) or output),
            fix="make room, or choose a place that you may write to",
        ) from error


def _error_number(error: OSError | SafetensorError) -> int | None:
    """The number of an error; `shutil.copytree` and safetensors tell it as text alone."""
    if isinstance(error, OSError) and not isinstance(error, shutil.Error):
        return error.errno
    told = re.search(r"\[Errno (\d+)\]|\(os error (\d+)\)", str(error))
    return int(told[1] or told[2]) if told else None


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse to go on where what is to be written cannot fit: for writers that abort then.

    Raises:
        OSError: a folder's file system has fewer bytes left.
    """
    if shutil.disk_usage(folder).free < nbytes:
        raise OSError(errno.ENOSPC, f"less than {nbytes} bytes are free", str(folder))


def check_output(output: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output path before any work is done for it.

    Raises:
        OutputError: as for `check_place`; or `output` exists without `overwrite`, or exists and was
            not made here.
    """
    check_place(output, inputs)
    if not os.path.lexists(output):
        return
    if not made_here(output):
        raise OutputError(
            f"{output} exists and was not made by upcycle",
            where=str(output.resolve()),
            fix="remove it yourself, or name another output",
        )
    if not overwrite:
        raise OutputError(
            f"{output} exists",
            where=str(output.resolve()),
            fix="name another output, or pass --overwrite to replace it",
        )


def check_place(output: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse a path where nothing may be written.

    Raises:
        OutputError: `output` has no name of its own, or too long a one; is, lies in or contains one
            of the inputs; or lies inside a package.
    """
    if output.name in ("", ".."):
        raise OutputError(
            f"{output} cannot be an output", where=str(output.absolute()), fix="name a new folder"
        )
    if len(os.fsencode(f".{output.name}.replaced")) > _LONGEST_NAME:  # hidden names beside it
        raise OutputError(
            f"the name of the output has {len(os.fsencode(output.name))} bytes",
            where=str(output.absolute()),
            fix=f"name it in {_LONGEST_NAME - len('..replaced')} bytes or fewer",
        )
    for path in inputs:
        mine, theirs = output.resolve(), path.resolve()
        if mine == theirs or theirs in mine.parents:
            raise OutputError(
                f"the output {output} lies inside the input {path}",
                where=str(mine),
                fix="name an output outside the inputs, which are only read",
            )
        if mine in theirs.parents:
            raise OutputError(
                f"the output {output} contains the input {path}",
                where=str(theirs),
                fix="name an output beside the inputs, which are only read",
            )
    for parent in output.resolve().parents:
        if parent.suffix in _PACKAGES and parent.is_dir():
            raise OutputError(
                f"the output {output} lies inside the package {parent.name}",
                where=str(parent),
                fix="name an output outside of packages",
            )


def sync_tree(folder: Path) -> None:
    """Fsync every file and folder below `folder`, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink():
                sync(path)
        sync(Path(root))


def sync(path: Path, *, keep_cached: bool = True) -> None:
    """Fsync one file or folder.

    Args:
        path: the file or folder.
        keep_cached: False lets the system use the file's memory for what is written next.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if not keep_cached and sys.platform == "linux":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, output: Path) -> Iterator[None]:
    """Hold a folder's lock, which goes with the process however it ends.

    Raises:
        OutputError: another process holds it, or the folder is a link to somewhere else.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise OutputError(
            f"{folder} is in the way of {output}: {os.strerror(error.errno or 0)}",
            where=str(folder),
            fix="remove it",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OutputError(
            f"another process is writing {output}",
            where=str(folder),
            fix="wait for it, or name another output",
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def clear(folder: Path, *, keep: Container[str] = (), only: Container[str] | None = None) -> None:
    """Remove what is in a folder, but the entries named in `keep`, or `only` those named there."""
    for entry in folder.iterdir():
        if entry.name not in keep and (only is None or entry.name in only):
            _remove(entry)


def _publish(staging: Path, entry: Path, output: Path, overwrite: bool) -> None:
    """Sync, then rename onto `output`; a folder there already steps aside first and goes last."""
    follow_umask(entry)
    sync_tree(staging)
    check_output(output, overwrite=overwrite)  # it may have appeared meanwhile
    aside = output.parent / f".{output.name}.replaced"
    _remove(aside)
    with stopping.cleanup(lambda: _remove(aside)):
        with stopping.shielded():
            if os.path.lexists(output):
                os.rename(output, aside)
            os.rename(entry, output)
        sync(output.parent)
        _remove(aside)


def follow_umask(entry: Path) -> None:
    """Give what was written the modes of files that are simply opened.

    safetensors and temporary files keep theirs from everybody else (safetensors#782).
    """
    mask = os.umask(0)
    os.umask(mask)
    for path in (entry, *entry.rglob("*")):
        if not path.is_symlink():
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
