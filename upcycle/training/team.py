"""The processes that `torchrun` or `accelerate launch` started together.

The first one leads: it works alone until it gives the others a word, and they wait for it. Words
go through torch's store. A collective would time out while the first process converts or
evaluates for hours.
"""

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from upcycle import stopping
from upcycle.errors import TrainingError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_NUMBERS = ("RANK", "MASTER_PORT")
_MEETING = timedelta(minutes=30)  # for all processes to start
_POLL_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
_END = "end "


class Team:
    """One process's view of all.

    Args:
        store: shared by all.
        rank: of this process, 0 for the first.
        size: how many there are.
    """

    def __init__(self, store: "Store", rank: int, size: int) -> None:
        self._store = store
        self._size = size
        self._words = 0
        self._is_lost = False
        self.is_first = rank == 0

    def tell(self, word: str) -> None:
        """Give the others a word; the first process does."""
        self._store.set(f"word {self._words}", word)
        self._words += 1

    def wait(self) -> str | None:
        """The first process's next word, however long that takes; None once it has ended.

        Raises:
            TrainingError: the launcher is gone.
        """
        key = f"word {self._words}"
        while not self._has(key):  # polled: a signal would not end a wait inside the store
            if self._is_lost:
                raise TrainingError(
                    "the launcher is gone",
                    where="the processes that were started together",
                    fix="start the command again; it goes on from the newest state",
                )
            time.sleep(_POLL_SECONDS)
        word = self._store.get(key).decode()
        if word.startswith(_END):
            return None
        self._words += 1
        return word

    def has_ended(self, seconds: float = _FAREWELL_SECONDS) -> bool:
        """Whether the first process ends within that time: what ended it ended this one too."""
        until = time.monotonic() + seconds
        while not self._has("end"):
            if self._is_lost or time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def end(self, code: int) -> int:
        """End all processes with the first one's exit code.

        Args:
            code: this process's own.

        Returns:
            The exit code to end with: this process's own where it failed and the first did not.
        """
        from torch.distributed import DistError

        if self.is_first:
            _outlive_the_launcher()
            with suppress(DistError):  # the store went with its launcher
                self.tell(f"{_END}{code}")
                self._store.set("end", str(code))
                self._wait_for_farewells()
            return code
        if code and not self.has_ended(0):
            return code
        with suppress(TrainingError):  # the launcher is gone, which no longer matters
            while self.wait() is not None:
                pass
        _outlive_the_launcher()
        with suppress(DistError):
            code = int(self._store.get("end"))
            self._store.add("farewells", 1)
        return code

    def _has(self, key: str) -> bool:
        from torch.distributed import DistError

        try:
            return self._store.check([key])
        except DistError:  # the store went with its launcher
            self._is_lost = True
            return False

    def _wait_for_farewells(self) -> None:
        """Until the others have read the end: launchers stop them once one process is gone."""
        until = time.monotonic() + _FAREWELL_SECONDS
        while self._store.add("farewells", 0) < self._size - 1 and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


def _outlive_the_launcher() -> None:
    """Keep this process's exit code: launchers stop all processes once one has failed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def peers() -> Iterator[None]:
    """Say what it means where a collective fails, because another process is gone.

    A signal's own last line tells it where there was one.

    Raises:
        TrainingError: a process of the run ended, or cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        if stopping.received() or not _is_of_peers(error):
            raise
        raise TrainingError(
            f"another process of the run ended or cannot be reached: {error}",
            where="the processes that were started together",
            fix="see what ended it, such as a lack of memory; then start the command again "
            "(`train` with --resume), which goes on from the newest state",
        ) from error


def _is_of_peers(error: RuntimeError) -> bool:
    """Whether an error is of the transport; gloo's have no type of their own."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or re.search(r"\bgloo\b", str(error)) is not None


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes were started together; 1 where the environment gives no number."""
    told = environment.get("WORLD_SIZE", "").strip()
    return int(told) if told.isdecimal() and int(told) else 1


def missing_address(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The variables that the processes meet by which are not as a launcher sets them."""
    told = {name: environment.get(name, "").strip() for name in (*_NUMBERS, "MASTER_ADDR")}
    return [
        name
        for name, value in told.items()
        if not (value.isdecimal() if name in _NUMBERS else value)
    ]


@functools.cache
def team() -> Team | None:
    """The team that this process belongs to; None for one that was started alone."""
    if world_size() == 1 or missing_address():  # which `check_launch` refuses
        return None
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=_MEETING))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Team(PrefixStore(f"upcycle {attempt}", store), rank, size)
