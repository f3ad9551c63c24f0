"""`log.jsonl`: one JSON object per event of a run, each step in it once."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.staging import write_file
from upcycle.utf8 import to_json

LOG_NAME = "log.jsonl"
_MOST_STEPS = 2**53  # what other readers of JSON can count to
_LARGEST = 2.0**127  # of fp32, in which all of it is computed; no axis can show more


class RunLog:
    """Appends records; each has a "step": optimiser steps done when it was written.

    A step's record has tokens (trained on so far), loss, ce, kl (nats per token), lr, grad_norm
    and tokens_per_second; an evaluation's heldout_nll and heldout_kl; a skipped step's skipped and
    rows; a state that was not saved the reason, unsaved; states of broken
    weights their new names, set_aside; a resumption's resumed, notes and changes,
    each with step, key, from and to. A number that is not finite is null.

    Args:
        path: the file.
        after: records of later steps, left by a run that went on before it was killed, are
            removed; None starts the file anew.
        writes: False on all processes but one: they keep their records to themselves.
    """

    def __init__(self, path: Path, *, after: int | None, writes: bool = True) -> None:
        self._path = path if writes else None
        found = [] if after is None or not path.is_file() else read_log(path)
        kept = [record for record in found if after is not None and record["step"] <= after]
        self.held_out: list[tuple[float, float]] = [
            (_number(record, "heldout_nll"), _number(record, "heldout_kl"))
            for record in kept
            if "heldout_nll" in record and "heldout_kl" in record
        ]
        if self._path is not None:
            write_file(path, "".join(map(_line, kept)))

    def write(self, step: int, **values: Any) -> None:
        """Append one record."""
        if "heldout_nll" in values:
            self.held_out.append((values["heldout_nll"], values["heldout_kl"]))
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line({"step": step, **values}))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, without lines that a killed run did not finish or nobody here wrote."""
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= _MOST_STEPS:
            records.append(record)
    return records


def is_log(path: Path) -> bool:
    """Whether a file is empty or begins as the log of a run does."""
    if not (path.is_file() and path.stat().st_size):
        return path.is_file()
    records = read_log(path)
    return bool(records) and bool(records[0].keys() & {"heldout_nll", "resumed"})


def logged_number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record that fp32 can hold; None where it has none, as for the not finite."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None


def _line(record: dict[str, Any]) -> str:
    return to_json(record) + "\n"


def _number(record: Mapping[str, Any], key: str) -> float:
    """A logged number again."""
    number = logged_number(record, key)
    return math.nan if number is None else number
