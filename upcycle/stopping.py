"""Ctrl-C and SIGTERM: the process ends without leaving anything half-written.

Only the command line installs handlers (`handling`). Without them all of this does nothing, and
Python's KeyboardInterrupt unwinds a call of the library as ever.

A signal ends the process directly and raises nothing: an exception out of nowhere may be swallowed,
changed or printed by whoever runs just then, be it an import, a destructor or a third party. What
would be left behind is registered as a `cleanup`. Training is `deferred`: it looks for a signal
at each step boundary, and only where it does not get there in time the process ends all the same.
"""

import atexit
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

# torchrun's and Kubernetes' launchers kill what still runs so many seconds after their signal.
LAUNCHER_PATIENCE = 30.0
_MARGIN = 4.0  # of it, to remove what is unfinished
_SAME_SIGNAL = 0.25  # seconds in which a second one is the first, passed on by a launcher
_PARKING = 1.0  # seconds until the main thread surely is in a long call that is not Python's
_SHIELDED = 10.0  # and until it is through with what it must finish
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSE, _LOOK = 0, 255  # on the pipe, beside the numbers of signals


class Stopped(BaseException):
    """A signal was heeded at a safe point.

    Args:
        number: of the signal.
        what: how far the work got, for the command's last line.
    """

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number
        self.what = what


@contextmanager
def handling(*, speaks: bool) -> Iterator[None]:
    """Heed signals while a command runs, in the main thread; elsewhere nothing is changed.

    Args:
        speaks: whether this process says what it was stopped by.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _current = _Handlers(speaks)
    before = {
        number: signal.signal(number, handlers.handle)
        for number in _SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup
    }
    fd_before = signal.set_wakeup_fd(handlers.pipe, warn_on_full_buffer=False)
    try:
        yield
    finally:
        # Nothing is at stake while the interpreter and its libraries take themselves down.
        atexit.unregister(_ignore_signals)
        atexit.register(_ignore_signals)
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        _current = None
        handlers.close()


def advise(how_to_go_on: Callable[[], str], *, resumable: bool = False) -> None:
    """What the last line of a stopped command says; asked for when it is needed.

    Args:
        how_to_go_on: such as "resume with: upcycle ...".
        resumable: what a later run can go on with stays, see `is_resumable`.
    """
    if _current is not None:
        _current.advice, _current.resumable = how_to_go_on, resumable


def is_resumable() -> bool:
    """Whether a signal leaves what the command can be resumed from."""
    return _current is not None and _current.resumable


@contextmanager
def cleanup(action: Callable[[], object]) -> Iterator[None]:
    """Where a signal ends the process within the block, the action is done first."""
    handlers = _current
    if handlers is None:
        yield
        return

    once = partial(action)  # equals nothing but itself
    handlers.cleanups.append(once)
    try:
        yield
    finally:
        handlers.cleanups.remove(once)


@contextmanager
def shielded() -> Iterator[None]:
    """A few quick operations of the main thread that a signal does not come between."""
    handlers = _current
    if handlers is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    nested, handlers.shielded = handlers.shielded, True
    try:
        yield
    finally:
        handlers.shielded = nested
        if not nested and handlers.must_end():
            handlers.park()


@contextmanager
def deferred(fallback: Callable[[], str]) -> Iterator[None]:
    """Work that looks for `received` at its safe points, and raises `Stopped` there.

    Args:
        fallback: says what is kept, where it does not get to one in time.
    """
    handlers = _current
    if handlers is None:
        yield
        return
    handlers.fallback = fallback
    try:
        yield
    except BaseException:
        handlers.taken_over = True  # whoever catches it says so
        raise
    finally:
        handlers.fallback = None
        if handlers.must_end():
            handlers.park()


def received() -> tuple[int, float] | None:
    """The first signal's number, and the seconds since; None where there was none."""
    if _current is None or _current.first is None:
        return None
    number, when = _current.first
    return number, time.monotonic() - when


def adopt(number: int, seconds: float) -> None:
    """Take over a signal that another process of the same run got `seconds` ago."""
    if _current is not None:
        _current.note(number, seconds)


def last_line(number: int, what: str) -> str:
    """What a stopped command says, in one line."""
    advice = "" if _current is None else _current.advice()
    name = signal.Signals(number).name
    return "; ".join(part for part in (f"stopped by {name}", what, advice) if part)


def exit_code(number: int) -> int:
    """The exit code of a process that a signal ended, as shells count it."""
    return 128 + number


def remove_folder(folder: Path) -> None:
    """Remove a folder that threads of this process may still write into."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


class _Handlers:
    """The handlers of one command, and the thread that acts while the main one cannot.

    Python runs handlers between two of its own operations only; the system writes a signal's number
    into the pipe at once, and the thread reads it there.
    """

    def __init__(self, speaks: bool) -> None:
        self.first: tuple[int, float] | None = None
        self.advice: Callable[[], str] = lambda: "nothing half-written is kept"
        self.resumable = False
        self.fallback: Callable[[], str] | None = None
        self.cleanups: list[Callable[[], object]] = []
        self.shielded = False
        self.taken_over = False
        self._speaks = speaks
        self._ending = False
        self._own_signals = 0
        self._parked = threading.Event()
        self._read, self.pipe = os.pipe()
        for end in (self._read, self.pipe):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._write(_CLOSE)
        self._thread.join()
        for end in (self._read, self.pipe):
            os.close(end)

    def handle(self, number: int, _: FrameType | None) -> None:
        """Python's own handler, in the main thread."""
        self.note(number)
        if self.must_end() and not self.shielded:
            self.park()

    def note(self, number: int, seconds: float = 0.0) -> None:
        """Remember the first signal, and have the thread look at it."""
        if self.first is None:
            self.first = (number, time.monotonic() - seconds)
        self._write(_LOOK)

    def must_end(self) -> bool:
        """Whether only the thread will end the process."""
        return self._ending or (
            self.first is not None and self.fallback is None and not self.taken_over
        )

    def park(self) -> NoReturn:
        """Keep the main thread from going on, for the process is about to end."""
        self._parked.set()
        self._write(_LOOK)
        while True:
            time.sleep(3600)

    def _write(self, number: int) -> None:
        with suppress(BlockingIOError):  # full of news already
            os.write(self.pipe, bytes([number]))

    def _watch(self) -> None:
        first_seen: float | None = None
        while True:
            found = self._next_news()
            if _CLOSE in found:
                return
            for number in found:
                if number not in _SIGNALS:
                    continue
                if self._own_signals:
                    self._own_signals -= 1
                elif first_seen is None:
                    first_seen = time.monotonic()
                    self.note(number)
                elif time.monotonic() - first_seen > _SAME_SIGNAL:
                    self._at_once()
            if not self._ending and (self.must_end() or self._seconds_left() <= 0):
                self._ending = True
                threading.Thread(target=self._end, daemon=True).start()

    def _next_news(self) -> bytes:
        waits = None if self.first is None or self._ending else max(0.0, self._seconds_left())
        ready = select.select([self._read], [], [], waits)[0]
        return os.read(self._read, 4096) if ready else b""

    def _seconds_left(self) -> float:
        if self.first is None:
            return LAUNCHER_PATIENCE
        return self.first[1] + LAUNCHER_PATIENCE - _MARGIN - time.monotonic()

    def _at_once(self) -> NoReturn:
        assert self.first is not None
        self._say("stopped at once by a second signal")
        os._exit(exit_code(self.first[0]))

    def _end(self) -> None:
        """Clean up, say so and end the process, with the main thread out of the way."""
        assert self.first is not None
        number = self.first[0]
        fallback = self.fallback
        if not self._parked.is_set():
            self._own_signals += 1
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)
        if not self._parked.wait(_PARKING) and self.shielded:
            self._parked.wait(_SHIELDED)
        if self._parked.is_set() or not self.shielded:
            for action in reversed(self.cleanups):
                with suppress(Exception):  # nothing may keep the process from ending
                    action()
        what = "" if fallback is None else fallback()
        self._say(last_line(number, what))
        # The main thread may hold the lock of what it was printing to.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_PARKING)
        os._exit(exit_code(number))

    def _say(self, line: str) -> None:
        """Past Python's buffers, whose locks the main thread may hold."""
        if not self._speaks:
            return
        # In place of a bar that may be drawn there; the cursor, which that hides, comes back.
        bar = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
        with suppress(OSError):
            os.write(2, f"{bar}{line}\n".encode(errors="replace"))


_current: _Handlers | None = None


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
