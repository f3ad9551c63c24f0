"""The fourth stage: the last checkpoint as a Core ML package, or as a folder of several."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from upcycle.checkpoint.manifest import hash_file
from upcycle.export.quantize.schemes import load_quantization
from upcycle.models.calibration_text import path_of
from upcycle.options.export import ExportOptions
from upcycle.pipeline.stage import Cost, Note, Precondition, Stage
from upcycle.program.chunked import bundle_folder
from upcycle.progress import Watcher


class Export(Stage):
    """Export the checkpoint that was judged."""

    name = "export"
    needs = ("convert", "train")
    unnoted_kind = "the quantisation scheme or its text"
    asked: ExportOptions

    @property
    def folder(self) -> Path:
        """The folder of the chunks, or the one beside the package."""
        return self.output if self.asked.chunk_size is not None else bundle_folder(self.output)

    def preconditions(self) -> list[Precondition]:
        """The options and the quantisation scheme."""
        return [Precondition("export", Cost.SOURCE, self._check_options)]

    def _check_options(self) -> str:
        from upcycle.export.coreml import SUFFIX
        from upcycle.export.request import check_target

        check_target(self.output, SUFFIX, self.asked)
        if self.asked.quantize is not None:
            load_quantization(self.asked.quantize)
        return f"{self.output.name}, context {self.asked.context}"

    def inputs(self) -> dict[str, Any]:
        """The checkpoint's configuration and weights."""
        return self.run.weights(self.run.last)

    def unnoted(self) -> str | None:
        """A hash of what decides how weights are stored, but for a preset's own name."""
        asked = self.asked
        if asked.quantize is None:
            return None
        is_file = Path(asked.quantize).is_file()
        texts = []
        if load_quantization(asked.quantize).promote is not None:
            texts = [self.run.content(path_of(text)) for text in asked.calibration]
        elif not is_file:
            return None
        read = [hash_file(Path(asked.quantize)) if is_file else asked.quantize, texts]
        return xxhash.xxh3_128_hexdigest(json.dumps(read, sort_keys=True).encode())

    def parts(self) -> Mapping[str, Path]:
        """The folder that has the manifest, and the package beside it."""
        beside = {} if self.folder == self.output else {"package": self.output}
        return {"files": self.folder, **beside}

    def make(self, watch: Watcher, note: Note) -> None:
        """Export."""
        from upcycle.export.coreml import export_coreml
        from upcycle.export.risks import device_notes

        made = export_coreml(self.run.last, self.output, self.asked, overwrite=True, watch=watch)
        for text in device_notes(made, core_ai=False):
            note(f"note: {text}")
