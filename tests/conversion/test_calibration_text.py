"""Rows of calibration text: how many, which, and refusals."""

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import DataError, UpcycleWarning
from upcycle.models.calibration_text import calibration_rows
from upcycle.parity.check import read_tokens


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint(tmp_path / "model"))


def text_file(folder: Path, text: str) -> Path:
    path = folder / "text.txt"
    path.write_text(text)
    return path


def test_rows_are_stretches_of_the_text(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = text_file(tmp_path, "abcdefghijklmnopqrstuvwxyz")  # 28 tokens with begin and end
    rows = calibration_rows(checkpoint, [path], tokens=17, sequence_length=4)
    assert rows.shape == (4, 4)
    assert rows.dtype == torch.int64
    everything = calibration_rows(checkpoint, [path], tokens=28, sequence_length=28)[0].tolist()
    stretches = [everything[i : i + 4] for i in range(0, 28, 4)]
    assert all(row in stretches for row in rows.tolist())
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_the_seed_decides_which(checkpoint: Checkpoint) -> None:
    def drawn(seed: int) -> torch.Tensor:
        return calibration_rows(checkpoint, ["builtin"], tokens=64, sequence_length=16, seed=seed)

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))


def test_rows_are_no_longer_than_the_model_has_positions(checkpoint: Checkpoint) -> None:
    rows = calibration_rows(checkpoint, ["builtin"], tokens=512, sequence_length=256)
    assert rows.shape == (4, 128)


def test_too_little_text_is_refused_with_counts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = text_file(tmp_path, "abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(DataError, match=r"40 tokens .* there are 28, 2 rows of 10 instead of 4"):
        calibration_rows(checkpoint, [path], tokens=40, sequence_length=10)
    with pytest.raises(DataError, match=r"\n.*add text, or pass --calibration-tokens 20$"):
        calibration_rows(checkpoint, [path], tokens=40, sequence_length=10)
    with pytest.raises(DataError, match=r"\n.*add text$"):
        calibration_rows(checkpoint, [path], tokens=40, sequence_length=10, option=None)
    with pytest.raises(DataError, match=r"0 rows of 32 instead of 1\n.*\n.*add text$"):
        calibration_rows(checkpoint, [path], tokens=40, sequence_length=32)


def test_a_text_that_is_not_there_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        calibration_rows(checkpoint, [tmp_path / "none.txt"], tokens=4, sequence_length=4)


def test_a_bad_row_is_left_out_and_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"text": "xxxxxxxx"}\n' * 19
    path.write_text(good)
    clean = calibration_rows(checkpoint, [path], tokens=100, sequence_length=10)
    path.write_text('{"text": 5}\n' + good)
    with pytest.warns(UpcycleWarning, match="1 bad"):
        rows = calibration_rows(checkpoint, [path], tokens=100, sequence_length=10)
    assert torch.equal(rows, clean)
    with pytest.warns(UpcycleWarning, match="1 bad"):
        assert read_tokens(checkpoint.folder, [path], 20).tolist() != []
