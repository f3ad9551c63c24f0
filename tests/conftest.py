"""Settings and fixtures of every test."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Time is no property of ours: a busy machine must not fail a test.
settings.register_profile("upcycle", deadline=None)
settings.load_profile("upcycle")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M as a folder, made once by the script and kept: a download of 93 MB."""
    folder = ROOT / ".cache" / "smollm2"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the same test run waits here
        config = folder / "config.json"
        # Older versions of the script left the base of the rotation to rope_parameters alone.
        if not config.exists() or "rope_theta" not in json.loads(config.read_text()):
            script = ROOT / "scripts" / "make_smollm2.py"
            subprocess.run([sys.executable, script, folder, "--overwrite"], check=True)
    return folder
