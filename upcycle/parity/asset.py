"""A Core AI asset of `upcycle export`."""

from pathlib import Path

from upcycle.checkpoint.manifest import MANIFEST_NAME
from upcycle.export.coreai.programs import DTYPES
from upcycle.parity.program import Exported
from upcycle.program.coreai import read_program
from upcycle.program.noted import check_program, damaged, folder_manifest, not_ours


class Asset(Exported):
    """A Core AI asset of `upcycle export`; the weights are not among its graph."""

    @classmethod
    def read(cls, path: Path) -> "Asset":
        """Read an asset's program.

        Raises:
            CheckpointError: its manifest is damaged.
            ExportError: it is none, is damaged, or `upcycle export` did not make it.
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
