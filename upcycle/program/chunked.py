"""The packages of a chunked export, read as the one program that they are together."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from upcycle.checkpoint.manifest import hash_file
from upcycle.errors import ExportError
from upcycle.program.graph import METADATA_KEY, Function, Graph
from upcycle.program.noted import ExportManifest, folder_manifest, noted_manifest
from upcycle.program.operation import Operation
from upcycle.program.reading import read_graph
from upcycle.program.signature import HIDDEN, NEW_HIDDEN
from upcycle.program.specification import reading_product

_Value = TypeVar("_Value")


def chunk_name(number: int) -> str:
    """The name of a package of a chunked export, the first of which is number 1."""
    return f"chunk{number}.mlpackage"


def numbered(name: str, number: int) -> str:
    """What a value of a chunk is called among those of all chunks."""
    return f"{name}_chunk{number}"


def chunk_paths(output: Path) -> list[Path]:
    """The packages of what `upcycle export` made: a package, or a folder of chunks.

    Raises:
        CheckpointError: the folder's manifest is damaged.
        ExportError: the same.
    """
    return _paths(output, folder_manifest(output))


def _paths(output: Path, manifest: ExportManifest | None) -> list[Path]:
    chunks = None if manifest is None else manifest.result.chunks
    return [output / chunk_name(i + 1) for i in range(len(chunks))] if chunks else [output]


def read_exported(output: Path) -> Graph:
    """The graph of a package, or of a folder of chunks as one program.

    In the latter all values but the inputs and outputs are `numbered`, states too.

    Raises:
        CheckpointError: the folder's manifest is damaged.
        ExportError: there is no package, or a damaged one, or a chunk is another one.
    """
    manifest = folder_manifest(output)
    paths = _paths(output, manifest)
    graphs = [read_graph(path) for path in paths]
    if manifest is None or paths == [output]:
        return graphs[0]
    for number, (path, graph) in enumerate(zip(paths, graphs, strict=True), start=1):
        noted = noted_manifest(graph)
        if (
            noted is None
            or (noted.source, noted.options) != (manifest.source, manifest.options)
            or noted.result.chunk is None
            or noted.result.chunk.number != number
        ):
            raise ExportError(
                f"{path.name} is not chunk {number} of the export that its folder is of",
                where=str(path),
                fix="export the checkpoint again",
            )
    functions = {
        name: _join([graph.functions[name] for graph in graphs]) for name in graphs[0].functions
    }
    return Graph(functions, {METADATA_KEY: json.dumps(manifest.document)}, graphs[0].default)


def _join(parts: Sequence[Function]) -> Function:
    """Functions of chunks as one; each takes the hidden states of the one before."""
    renamed = [_rename(part, number) for number, part in enumerate(parts, start=1)]
    joined = renamed[0]
    for part in renamed[1:]:
        joined = Function(
            operations=joined.operations + part.operations,
            types={**joined.types, **part.types},
            states={**joined.states, **part.states},
            weights={**joined.weights, **part.weights},
            inputs=tuple(dict.fromkeys(joined.inputs + part.inputs)),
            outputs=joined.outputs + part.outputs,
            literals={**joined.literals, **part.literals},
            declared={**joined.declared, **part.declared},
        )
    return joined


def _rename(part: Function, number: int) -> Function:
    """A chunk's function with names that no other has; its hidden states are no input or output."""
    inputs = tuple(name for name in part.inputs if name != HIDDEN)
    outputs = tuple(name for name in part.outputs if name != NEW_HIDDEN)

    def name(old: str) -> str:
        if old in inputs or old in outputs:
            return old
        if old == HIDDEN and old in part.inputs:
            return numbered(NEW_HIDDEN, number - 1)
        return numbered(old, number)

    return Function(
        operations=tuple(_rename_values(op, name) for op in part.operations),
        types=_rename_keys(part.types, name),
        states=_rename_keys(part.states, name),
        weights=_rename_keys(part.weights, name),
        inputs=inputs,
        outputs=outputs,
        literals=_rename_keys(part.literals, name),
        declared=_rename_keys(part.declared, name),
    )


def _rename_keys(values: Mapping[str, _Value], name: Callable[[str], str]) -> dict[str, _Value]:
    return {name(old): value for old, value in values.items()}


def _rename_values(op: Operation, name: Callable[[str], str]) -> Operation:
    inputs = {key: tuple(map(name, operands)) for key, operands in op.inputs.items()}
    return replace(op, inputs=inputs, outputs=tuple(map(name, op.outputs)))


def bundle_folder(package: Path) -> Path:
    """The folder beside `model.mlpackage`: `model-tokenizer`."""
    return package.with_name(f"{package.stem}-tokenizer")


def check_hashes(product: Path) -> None:
    """Refuse a package, or a folder of chunks, of which a file was changed after its export.

    The hashes are in the folder of chunks, or in the one beside a package; a package that lies
    without it is not checked.

    Raises:
        CheckpointError: the folder's manifest cannot be read.
        ExportError: a file is missing or has another hash, or the manifest is damaged.
    """
    product = product.resolve()  # the folder lies beside what a link leads to
    for package in chunk_paths(product):
        for name, noted in sorted(_noted_hashes(product, package).items()):
            path = package / name
            with reading_product(path):
                changed = not path.is_file() or hash_file(path) != noted
            if changed:
                raise ExportError(
                    f"{name} of {package.name} is not the file that `upcycle export` made",
                    where=str(path),
                    fix="export the checkpoint again, or name a package that was changed on "
                    "purpose otherwise than the export",
                )


def _noted_hashes(product: Path, package: Path) -> Mapping[str, str]:
    """The hash of each file of a package, by its path in it."""
    manifest = folder_manifest(bundle_folder(product) if package == product else product)
    if manifest is None:
        return {}
    if package == product:
        return manifest.result.package
    inside = f"{package.name}/"
    return {
        name.removeprefix(inside): noted
        for name, noted in manifest.result.files.items()
        if name.startswith(inside)
    }
