"""The packages of one export: the whole model in one, or a chunk of it in each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upcycle.checkpoint.files import under_utf8_name
from upcycle.export.checks import check_chunk, check_graph
from upcycle.export.chunks.decoders import cut_decoder
from upcycle.export.chunks.sizes import prepared_for
from upcycle.export.quantize.preparation import Prepared
from upcycle.export.request import HUB_NAME_KEY, functions_of
from upcycle.export.saving import save_package, weights_size
from upcycle.options.export import ExportOptions
from upcycle.program.chunked import chunk_name
from upcycle.program.graph import METADATA_KEY
from upcycle.program.noted import Chunk, ExportManifest
from upcycle.program.reading import read_graph
from upcycle.utf8 import shown, to_json


@dataclass(frozen=True)
class PlannedPackage:
    """A package to be saved.

    Attributes:
        name: of the package.
        decoder: what it computes.
        manifest: what to note in it.
        prepared: how its weights are quantised, None for fp16.
        max_bytes: what its weights may take; any where None.
    """

    name: str
    decoder: Any
    manifest: ExportManifest
    prepared: Prepared | None
    max_bytes: int | None = None

    def save(
        self,
        folder: Path,
        options: ExportOptions,
        *,
        hub_name: str,
        watch: Callable[[str], None],
    ) -> Chunk | None:
        """Save the package and see that it computes what it must.

        Args:
            folder: where it goes.
            options: those of the export.
            hub_name: where apps find the tokenizer.
            watch: told of each step.

        Returns:
            What its folder notes of it, with its name and size; None of a whole model.

        Raises:
            ExportError: what the decoder computes depends on more than the shape of its inputs.
            BrokenExportError: the saved program is not the decoder's (our bug).
        """
        package = folder / self.name
        noted = to_json(self.manifest.document, sort_keys=True)
        with under_utf8_name(folder) as named:
            save_package(
                self.decoder,
                named / self.name,
                functions=functions_of(options),
                metadata={HUB_NAME_KEY: shown(hub_name), METADATA_KEY: noted},
                compress=self.prepared.compress if self.prepared else None,
                watch=watch,
            )
        watch("checking")
        for function in read_graph(package).functions.values():
            check_graph(function, self.decoder.shape, options)
        size = weights_size(package)
        if self.max_bytes is not None:
            check_chunk(size, self.max_bytes)
        chunk = self.manifest.result.chunk
        stored = {"package": self.name, "weight_bytes": size}
        return chunk and Chunk.model_validate({**stored, **chunk.document})


def chunk_packages(
    decoder: Any,
    manifest: ExportManifest,
    options: ExportOptions,
    prepared: Prepared | None,
) -> list[PlannedPackage]:
    """The fewest packages that a decoder's layers fit into.

    Args:
        decoder: the whole one.
        manifest: of the export.
        options: those of the export, with a chunk size.
        prepared: how the weights are quantised, None for fp16.

    Raises:
        ExportError: as for `cut_decoder`.
    """
    chunks = cut_decoder(decoder, options, prepared)
    parts = []
    for number, chunk in enumerate(chunks, start=1):
        own = prepared and prepared_for(prepared, chunk.layers, decoder.shape.num_layers)
        part = Chunk(
            number=number,
            of=len(chunks),
            first_layer=chunk.layers.start,
            num_layers=len(chunk.layers),
        )
        result = manifest.result.updated(
            decoder=chunk.shape.document,
            quantization=own.record() if own else None,
            chunk=part.document,
        )
        noted = manifest.updated(result=result.document)
        parts.append(PlannedPackage(chunk_name(number), chunk, noted, own, chunk.max_bytes))
    return parts
