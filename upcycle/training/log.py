"""`log.jsonl`: one JSON object per event of a run, each step in it once."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from upcycle.checkpoint.manifest import ManifestPart, Texts, Told
from upcycle.checkpoint.staging import write_file
from upcycle.utf8 import to_json

LOG_NAME = "log.jsonl"
_MOST_STEPS = 2**53  # what other readers of JSON can count to
_LARGEST = 2.0**127  # of fp32, in which all of it is computed; no axis can show more


class LogRecord(ManifestPart):
    """One line of a log: what happened after a step. Its `document` has the keys that were given.

    Attributes:
        step: optimiser steps done when it was written.
        tokens: trained on so far; as what follows, of a step that moved the weights.
        loss: the training loss, nats per token.
        ce: cross-entropy, nats per token.
        kl: KL(source || student), nats per token.
        lr: the learning rate.
        grad_norm: before clipping.
        tokens_per_second: of this step.
        heldout_nll: of an evaluation, nats per token.
        heldout_kl: the same of KL(source || student).
        skipped: why the step did not move the weights.
        rows: row numbers of a skipped step's batch.
        unsaved: why the state was not saved.
        set_aside: new names of states of broken weights.
        resumed: whether a run goes on here.
        notes: of a resumption: states that were passed over.
        changes: of a resumption, as `facts.Change` has them.
        teacher: the name of a teacher that is not the source.
        files: hashes of that teacher's configuration and weights, by file name.
    """

    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    tokens: Told[float] = None
    loss: Told[float] = None
    ce: Told[float] = None
    kl: Told[float] = None
    lr: Told[float] = None
    grad_norm: Told[float] = None
    tokens_per_second: Told[float] = None
    heldout_nll: Told[float] = None
    heldout_kl: Told[float] = None
    skipped: Told[str] = None
    rows: Told[list[int]] = None
    unsaved: Told[str] = None
    set_aside: Told[list[str]] = None
    resumed: Told[bool] = None
    notes: Told[list[str]] = None
    changes: Told[list[dict[str, Any]]] = None
    teacher: Told[str] = None
    files: Texts = Field(default={})


class RunLog:
    """Appends records. A number that is not finite is null in the file.

    Args:
        path: the file.
        after: records of later steps, left by a run that went on before it was killed, are
            removed; None starts the file anew.
        writes: False on all processes but one: they keep their records to themselves.
    """

    def __init__(self, path: Path, *, after: int | None, writes: bool = True) -> None:
        self._path = path if writes else None
        found = [] if after is None or not path.is_file() else read_log(path)
        kept = [record for record in found if after is not None and record.step <= after]
        self.held_out: list[tuple[float, float]] = []
        for record in kept:
            self._remember(record)
        if self._path is not None:
            write_file(path, "".join(map(_line, kept)))

    def write(self, record: LogRecord) -> None:
        """Append one record."""
        self._remember(record)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(record))

    def _remember(self, record: LogRecord) -> None:
        if {"heldout_nll", "heldout_kl"} <= record.model_fields_set:
            nll, kl = record.heldout_nll, record.heldout_kl
            self.held_out.append((math.nan if nll is None else nll, math.nan if kl is None else kl))


def read_log(path: Path) -> list[LogRecord]:
    """The records of a log, without lines that are unfinished or that upcycle did not write.

    Raises:
        OSError: the file cannot be read.
    """
    records = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, RecursionError):  # pydantic's errors are ValueErrors
            records.append(LogRecord.model_validate(json.loads(line)))
    return records


def is_log(path: Path) -> bool:
    """Whether a file is empty or begins as the log of a run does."""
    if not (path.is_file() and path.stat().st_size):
        return path.is_file()
    records = read_log(path)
    return bool(records) and bool(records[0].model_fields_set & {"heldout_nll", "resumed"})


def drawable(number: float | None) -> float | None:
    """A logged number that fp32 can hold; None for others, as for those that are not finite."""
    return number if number is not None and abs(number) <= _LARGEST else None


def _line(record: LogRecord) -> str:
    return to_json(record.document) + "\n"
