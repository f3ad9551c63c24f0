"""safetensors/safetensors#782: weights written with mode 0600 whatever the umask says."""

import os
from pathlib import Path

from tests.tiny import tiny_checkpoint
from upcycle.conversion.run import convert


def test_every_output_file_follows_the_umask(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    before = os.umask(0o022)
    try:
        convert(source, tmp_path / "out", kv_heads=2)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o644}, modes
