"""The manifest that `upcycle export` notes in what it makes, read from anyone's package."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from upcycle.errors import ExportError
from upcycle.program.graph import METADATA_KEY, Graph
from upcycle.program.signature import DECODE

STAGE = "export"
_Count = Annotated[int, Field(gt=0)]


class _Part(BaseModel):
    """What is read of a part of the manifest; there may be more in it."""

    model_config = ConfigDict(frozen=True, strict=True)


class _Options(_Part):
    context: _Count


class _Decoder(_Part):
    num_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count
    value_head_dim: _Count
    num_linears: _Count
    masks: dict[str, _Count | None]


class _Chunk(_Part):
    number: _Count
    of: _Count
    first_layer: Annotated[int, Field(ge=0)]
    num_layers: _Count


class _Result(_Part):
    decoder: _Decoder
    chunk: _Chunk | None = None
    chunks: list[dict[str, Any]] | None = None
    files: dict[str, str] | None = None
    package: dict[str, str] | None = None


class _Manifest(_Part):
    source: dict[str, Any]
    options: _Options
    result: _Result


def check_manifest(document: object, where: str) -> dict[str, Any]:
    """A manifest of `upcycle export` as it was read, with every key that an export notes.

    Args:
        document: what was read.
        where: it was read, for the error.

    Raises:
        ExportError: a key is missing, or its value is of another kind.
    """
    try:
        _Manifest.model_validate(document)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        problem = f"{key} is missing or has a wrong value" if key else "it is no JSON object"
        raise damaged(problem, where) from error
    assert isinstance(document, dict)
    return document


def required_manifest(graph: Graph, product: Path) -> dict[str, Any]:
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


def noted_manifest(graph: Graph) -> dict[str, Any] | None:
    """The manifest of a package of `upcycle export`; None for others, and where it is damaged."""
    try:
        return required_manifest(graph, Path())
    except ExportError:
        return None


def check_program(graph: Graph, manifest: dict[str, Any], where: str) -> None:
    """See that a manifest's numbers can be those of a program: a check allocates by them.

    Raises:
        ExportError: the program has other masks or another context, or cannot have so many layers.
    """
    decoder, decode = manifest["result"]["decoder"], graph.functions.get(DECODE)
    if decode is None:
        raise damaged(f"the program has no function {DECODE!r}", where)
    if not decoder["masks"].keys() <= set(decode.inputs):
        raise damaged("result.decoder.masks names what is no input of the program", where)
    for name in decoder["masks"]:
        if decode.types[name].shape[-1:] != (manifest["options"]["context"],):
            raise damaged(f"options.context is not the length of the input {name!r}", where)
    if decoder["num_layers"] > len(decode.operations):
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
