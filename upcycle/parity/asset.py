"""A Core AI asset of `upcycle export`, and Apple's CPU runtime for it, in another process."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torch import Tensor

from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.checkpoint.staging import scratch_folder
from upcycle.errors import ExportError
from upcycle.export.coreai.programs import DTYPES
from upcycle.parity import asset_runtime as runtime
from upcycle.parity.exported import Exported
from upcycle.program.coreai import read_program
from upcycle.program.noted import check_program, damaged, folder_manifest, not_ours
from upcycle.stopping import cleanup


class Asset(Exported):
    """A Core AI asset of `upcycle export`; the weights are not among its graph."""

    @classmethod
    def read(cls, path: Path) -> "Asset":
        """Read an asset's program.

        Raises:
            CheckpointError: its manifest is damaged.
            ExportError: it is not an asset, is damaged, or `upcycle export` did not make it.
        """
        where = str(path / MANIFEST_NAME)
        manifest = folder_manifest(path)
        if manifest is None:
            raise not_ours(path, where)
        if manifest.options.dtype not in DTYPES:
            raise damaged("options.dtype is missing or has a wrong value", where)
        graph = read_program(path)
        check_program(graph, manifest, where)
        return cls(path, graph, manifest)

    @property
    def is_exact(self) -> bool:
        """Whether it computes in fp32, with the checkpoint's numbers."""
        return bool(self.manifest.options.dtype == "float32")


class AssetRunner:
    """A process that holds an asset and its states; a `Runner` for `upcycle.parity`.

    Args:
        asset: the `.aimodel`.
        process: runs `asset_runtime` on it.
        errors: what that process wrote to stderr.
    """

    def __init__(self, asset: Path, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._asset = asset
        self._process = process
        self._errors = errors
        self._receive("loading")

    def run(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call a function by its name.

        Raises:
            ExportError: the runtime refused the program or the inputs, or ended its process.
        """
        arrays = {key: value.numpy() for key, value in inputs.items()}
        outputs = self._ask(f"function {name}", "run", name, arrays)
        return {key: torch.from_numpy(value) for key, value in outputs.items()}

    def reset(self) -> None:
        """Empty the states.

        Raises:
            ExportError: the runtime ended its process.
        """
        self._ask("states", "reset")

    def state(self, name: str) -> Tensor:
        """The content of a state, of the shape that the asset declares.

        Raises:
            ExportError: there is none of that name, or the runtime ended its process.
        """
        return torch.from_numpy(self._ask(f"state {name}", "state", name))

    def _ask(self, what: str, *request: Any) -> Any:
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and its stderr says why
        return self._receive(what)

    def _receive(self, what: str) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except EOFError as error:
            raise ExportError(
                f"Apple's Core AI runtime ended while running {self._asset.name}: {self._reason()}",
                where=f"{self._asset}: {what}",
                fix="export it again with this version, with --kv-cache read-only, or with another "
                "--dtype",
            ) from error

    def _reason(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        # A crash of the runtime is described above its own backtrace.
        fatal = [line for line in lines if "Fatal error" in line or "Error:" in line]
        return f"{how}{', ' if lines else ''}{(fatal or lines or [''])[-1]}"


@contextmanager
def asset_runner(asset: Path) -> Iterator[AssetRunner]:
    """A process for an `.aimodel`, which ends with the block.

    Raises:
        ExportError: the runtime ended its process while it loaded the asset.
    """
    command = [sys.executable, "-P", runtime.__file__, str(asset)]
    pipe = subprocess.PIPE
    with (
        scratch_folder() as scratch,  # the runtime compiles into it, and leaves it when aborted
        TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(scratch)},
        ) as process,
        cleanup(process.kill),
    ):
        yield AssetRunner(asset, process, errors)
