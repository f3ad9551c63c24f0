"""A model with a shorter context than the windows is refused by the name of the option."""

from pathlib import Path

from typer.testing import CliRunner

from tests.tiny import tiny_checkpoint
from upcycle.cli import eval as _eval  # noqa: F401 - registers the command
from upcycle.cli import sweep as _sweep  # noqa: F401 - registers the command
from upcycle.cli.app import app


def test_the_option_is_named(tmp_path: Path) -> None:
    source = str(tiny_checkpoint(tmp_path / "source", max_position_embeddings=128))
    for words in (["sweep", source], ["eval", source, source, "--out", str(tmp_path / "report")]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, result.output
        assert "windows of 512 tokens exceed the model's context of 128" in result.stderr
        assert f"  where: --sequence-length; {source}\n" in result.stderr
        assert "  fix: set --sequence-length to at most 128\n" in result.stderr
