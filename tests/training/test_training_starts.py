"""What training refuses before its first step, and what it needs to measure anything."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from tests.tiny import tiny_model
from tests.training.runs import tiny_run
from upcycle.errors import DataError, EvaluationError, TrainingError
from upcycle.report.build import read_training_log
from upcycle.report.schema import HeldOutPoint
from upcycle.training import loop
from upcycle.training.log import LogRecord, RunLog, read_log
from upcycle.training.models import check_isolation
from upcycle.training.rows import check_text, training_rows


def test_processes_that_were_not_joined_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def apart(**settings: Any) -> SimpleNamespace:
        asked.update(settings)
        return SimpleNamespace(
            distributed_type=DistributedType.NO, num_processes=1, device=torch.device("cpu")
        )

    torchrun = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loop, "Accelerator", apart)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(TrainingError, match="2 processes were started, and accelerate joined 1"):
        tiny_run(tmp_path).train()
    assert asked["cpu"], "on a machine without an accelerator"


def test_the_held_out_rows_carry_a_loss_whatever_the_text_is_long(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run = replace(run, text=run.text.with_suffix(".txt"))
    without_loss = 0
    for length in range(160, 176):
        run.text.write_text("x" * length)
        rows, held_out = training_rows(run.student, run.recipe())
        assert held_out.num_targets > 0
        without_loss += len(held_out) == 2
        assert len(rows) + len(held_out) == math.ceil((length + 2) / 16)
    assert without_loss == 1, "the length that leaves one token in the last row"
    run.text.write_text("x" * (10 * 16 - 1))  # and BOS and EOS
    nll, _ = run.train(steps=1).heldout_nll
    assert nll > 0


def test_rows_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(EvaluationError, match="windows of 129 tokens exceed"):
        run.train(sequence_length=129)


def test_text_is_checked_as_training_would_check_it(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    rows, held_out = training_rows(run.student, run.recipe())
    most = len(rows)
    assert held_out.num_targets > 0
    check_text(run.student, run.recipe(batch_size=most, micro_batch_size=most))
    too_large = run.recipe(batch_size=most + 1, micro_batch_size=1)
    for check in (check_text, training_rows):
        with pytest.raises(DataError, match="too little text"):
            check(run.student, too_large)


def test_a_log_of_numbers_that_are_none_is_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path, after=None)
    log.write(LogRecord(step=0, heldout_nll=math.nan, heldout_kl=math.inf))
    log.write(LogRecord(step=1, loss=1.5, tokens=8))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "heldout_nll": None, "heldout_kl": None},
        {"step": 1, "loss": 1.5, "tokens": 8},
    ]
    assert read_log(path)[0].heldout_nll is None
    again = RunLog(path, after=1)
    assert math.isnan(again.held_out[0][0])
    shown = read_training_log(path)
    assert shown is not None
    assert shown.held_out[0] == HeldOutPoint(step=0, kl=None, nll=None)


def test_logits_that_are_no_numbers_are_named() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="logits are not finite"):
        check_isolation(model)
