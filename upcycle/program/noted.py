"""The manifest that `upcycle export` notes in what it makes, read from anyone's package."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from upcycle.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestPart,
    ManifestResult,
    read_manifest,
)
from upcycle.errors import ExportError
from upcycle.program.graph import METADATA_KEY, Graph
from upcycle.program.signature import DECODE
from upcycle.program.specification import reading_product

STAGE = "export"
_Count = Annotated[int, Field(gt=0)]


class ExportedOptions(ManifestPart):
    """What an export was asked for.

    Attributes:
        context: C, the positions that the cache holds.
        dtype: of a Core AI asset's arithmetic.
    """

    context: _Count
    dtype: str | None = None


class DecoderShape(ManifestPart):
    """What a decoder computes per token.

    Attributes:
        num_layers: L, layers that write to the KV cache.
        num_attention_heads: H.
        num_key_value_heads: g.
        head_dim: d, channels of a key head.
        value_head_dim: e, channels of a value head.
        num_linears: linear layers applied in one forward pass, as convolutions or not.
        masks: the mask inputs, and how many of the last tokens each lets see; None is all.
    """

    num_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count
    value_head_dim: _Count
    num_linears: Annotated[int, Field(ge=0)]
    masks: dict[str, _Count | None]


class Chunk(ManifestPart):
    """Which part of a model a package holds.

    Attributes:
        number: of the chunk, from 1.
        of: how many there are.
        first_layer: the model's layer that it begins with.
        num_layers: how many layers it has.
    """

    number: _Count
    of: _Count
    first_layer: Annotated[int, Field(ge=0)]
    num_layers: _Count


class ExportedResult(ManifestResult):
    """What an export made.

    Attributes:
        decoder: the program's numbers.
        chunk: which part of the model the package holds; None for all of it.
        chunks: the packages of a folder of chunks.
        files: hashes of the files of the folder, where the manifest lies in one.
        package: hashes of the files of the package beside that folder.
    """

    decoder: DecoderShape
    chunk: Chunk | None = None
    chunks: list[ManifestPart] | None = None
    files: dict[str, str] = Field(default={})
    package: dict[str, str] = Field(default={})


class ExportManifest(Manifest):
    """The manifest of `upcycle export`, every key that is read of it checked."""

    stage: str = STAGE
    options: ExportedOptions
    result: ExportedResult


def check_manifest(document: object, where: str) -> ExportManifest:
    """A manifest of `upcycle export`, with every key that an export notes.

    Args:
        document: what was read.
        where: it was read, for the error.

    Raises:
        ExportError: a key is missing, or its value is of another kind.
    """
    try:
        return ExportManifest.model_validate(document)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        problem = f"{key} is missing or has a wrong value" if key else "it is no JSON object"
        raise damaged(problem, where) from error


def folder_manifest(folder: Path) -> ExportManifest | None:
    """The manifest of a folder or asset; None where none of `upcycle export` is there.

    Raises:
        CheckpointError: it cannot be read.
        ExportError: the same, or a key is missing, or its value is of another kind.
    """
    with reading_product(folder):
        manifest = read_manifest(folder)
    if manifest is None or manifest.stage != STAGE:
        return None
    return check_manifest(manifest.document, str(folder / MANIFEST_NAME))


def required_manifest(graph: Graph, product: Path) -> ExportManifest:
    """The manifest in a package's metadata.

    Args:
        graph: of the package.
        product: the package, for the error.

    Raises:
        ExportError: there is none, or it is damaged, or the program is not the one that it is of.
    """
    where = f"{product}: its metadata, key {METADATA_KEY!r}"
    note = graph.metadata.get(METADATA_KEY)
    if note is None:
        raise not_ours(product, where)
    try:
        document = json.loads(note)
    except (ValueError, RecursionError) as error:
        raise damaged("it is no JSON", where) from error
    manifest = check_manifest(document, where)
    check_program(graph, manifest, where)
    return manifest


def noted_manifest(graph: Graph) -> ExportManifest | None:
    """The manifest of a package of `upcycle export`; None for others, and where it is damaged."""
    try:
        return required_manifest(graph, Path())
    except ExportError:
        return None


def check_program(graph: Graph, manifest: ExportManifest, where: str) -> None:
    """See that a manifest's numbers can be those of a program: a check allocates by them.

    Raises:
        ExportError: the program has other masks or another context, or cannot have so many layers.
    """
    decoder, decode = manifest.result.decoder, graph.functions.get(DECODE)
    if decode is None:
        raise damaged(f"the program has no function {DECODE!r}", where)
    if not decoder.masks.keys() <= set(decode.inputs):
        raise damaged("result.decoder.masks names what is no input of the program", where)
    for name in decoder.masks:
        if decode.types[name].shape[-1:] != (manifest.options.context,):
            raise damaged(f"options.context is not the length of the input {name!r}", where)
    if decoder.num_layers > len(decode.operations):
        raise damaged("result.decoder.num_layers is more than the program can have", where)


def damaged(problem: str, where: str) -> ExportError:
    """Of a manifest that an export did not note so."""
    return ExportError(
        f"the manifest of `upcycle export` is damaged: {problem}",
        where=where,
        fix="export the checkpoint again",
    )


def not_ours(product: Path, where: str) -> ExportError:
    """Of a program whose inputs are not known."""
    return ExportError(
        f"{product} was not made by `upcycle export`, so its inputs are not known",
        where=where,
        fix="export the checkpoint with `upcycle export`",
    )
