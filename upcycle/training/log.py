"""`log.jsonl`: one JSON object per event of a run, each step in it once."""

import json
import os
from pathlib import Path
from typing import Any


class RunLog:
    """Appends records; each has a "step": optimiser steps done when it was written.

    A step's record has tokens (trained on so far), loss, ce, kl (nats per token), lr, grad_norm
    and tokens_per_second; an evaluation's heldout_nll and heldout_kl; a skipped step's skipped and
    rows; a resumption's resumed and notes.

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
            (record["heldout_nll"], record["heldout_kl"])
            for record in kept
            if "heldout_nll" in record
        ]
        if self._path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(partial, path)

    def write(self, step: int, **values: Any) -> None:
        """Append one record."""
        if "heldout_nll" in values:
            self.held_out.append((values["heldout_nll"], values["heldout_kl"]))
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, up to a last line that a killed run did not finish."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
