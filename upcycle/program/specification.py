"""Read and write the specification of an `.mlpackage` without its weights, torch or coremltools."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from upcycle.errors import ExportError

_PROTO = "_upcycle_coreml_proto"
PROGRAM = "main.mlirb"  # of a Core AI asset


def read_specification(package: Path) -> Any:
    """The `Model` message of a Core ML package.

    Args:
        package: an `.mlpackage` folder.

    Raises:
        ExportError: it is none, is damaged, or holds no ML program.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    with reading_product(package):
        path = _specification_path(package)
        content = path.read_bytes()
    model = _model_message()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ExportError(
            f"{path.name} is no Core ML specification: {error}", where=str(path), fix=_REMAKE
        ) from error
    kind = model.WhichOneof("Type")
    if kind != "mlProgram":
        raise ExportError(
            f"the package holds {f'a model of type {kind}' if kind else 'no model'}",
            where=str(path),
            fix="name a package with an ML program, such as `upcycle export` makes",
        )
    return model


@contextmanager
def reading_product(product: Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that the user can mend.

    Raises:
        ExportError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot read {product}: {os.strerror(error.errno) if error.errno else error}",
            where=str(error.filename or product),
            fix="name a package that is whole, and that you may read",
        ) from error


def write_metadata(package: Path, metadata: Mapping[str, str]) -> None:
    """Replace what a package notes about itself; the same package and notes give the same bytes.

    Raises:
        ExportError: the package cannot be read.
    """
    model = read_specification(package)
    noted = model.description.metadata.userDefined
    noted.clear()
    noted.update(metadata)
    write_specification(package, model)


def write_specification(package: Path, model: Any) -> None:
    """Replace the `Model` message of a package; equal messages give the same bytes.

    Raises:
        ExportError: the package has no such file.
    """
    _specification_path(package).write_bytes(model.SerializeToString(deterministic=True))


def all_operations(operations: Iterable[Any]) -> Iterator[Any]:
    """Operations of a program and of the blocks inside them, in order."""
    for op in operations:
        yield op
        for block in op.blocks:
            yield from all_operations(block.operations)


_REMAKE = "name an .mlpackage made by `upcycle export` or coremltools, or make it again"


def _specification_path(package: Path) -> Path:
    manifest = package / "Manifest.json"
    if (package / PROGRAM).is_file():
        raise ExportError(
            f"{package} is a Core AI asset, no Core ML package",
            where=str(package),
            fix="name an .mlpackage; `upcycle check-export SRC OUT.aimodel` reads assets",
        )
    if not manifest.is_file():
        raise ExportError(
            f"{package} is no Core ML package: it has no Manifest.json",
            where=str(manifest),
            fix=_REMAKE,
        )
    try:
        document = json.loads(manifest.read_text(encoding="utf-8"))
        entry = document["itemInfoEntries"][document["rootModelIdentifier"]]
        path = package / "Data" / str(entry["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            "Manifest.json names no root model", where=str(manifest), fix=_REMAKE
        ) from error
    if not path.is_file():
        raise ExportError(
            f"the package lacks {path.name}, which its manifest names", where=str(path), fix=_REMAKE
        )
    return path


def _model_message() -> Any:
    """An empty `Model` message of coremltools' own protobuf classes.

    Importing `coremltools.proto` the usual way imports all of coremltools and torch (seconds), so
    its folder is loaded as a package of another name; protobuf shares equal descriptors.
    """
    if _PROTO not in sys.modules:
        coremltools = find_spec("coremltools")
        assert coremltools is not None
        assert coremltools.submodule_search_locations is not None
        folder = Path(coremltools.submodule_search_locations[0], "proto")
        spec = spec_from_file_location(
            _PROTO, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[_PROTO] = module
        spec.loader.exec_module(module)
    return sys.modules[f"{_PROTO}.Model_pb2"].Model()
