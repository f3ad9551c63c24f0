"""Join packages of one function each to one package whose functions share their weights.

coremltools' own `save_multifunction` holds all parts' weights in memory, and more than once: at 2.6
GB of weights it took 7 GB more than the conversions. Here they are compared and copied in pieces.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from upcycle.program.signature import DECODE
from upcycle.program.specification import all_operations, read_specification, write_specification
from upcycle.program.weight_file import GrowingFile

_DESCRIBED = ("input", "output", "state")


def join_functions(parts: Mapping[str, Path], package: Path) -> None:
    """Make one package of several; equal constants are stored once.

    Args:
        parts: packages with one function, which coremltools calls "main", by the name that it gets.
            The one that stays "main", which runs unless an app names another, becomes the package.
        package: the `.mlpackage` to make.
    """
    parts[DECODE].rename(package)
    joined = read_specification(package)
    functions = joined.mlProgram.functions
    models = {
        name: joined if name == DECODE else read_specification(part) for name, part in parts.items()
    }
    weights = GrowingFile(weight_file(package), _offsets(functions[DECODE]))
    for name, model in models.items():
        _describe(joined.description, name, model.description)
        if model is joined:
            continue
        function = model.mlProgram.functions[DECODE]
        places = weights.take(weight_file(parts[name]), _offsets(function))
        for blob in _blobs(function):
            blob.offset = places[blob.offset]
        functions[name].CopyFrom(function)
    joined.description.defaultFunctionName = DECODE
    for field in _DESCRIBED:  # those of a program of one function
        joined.description.ClearField(field)
    write_specification(package, joined)


def weight_file(package: Path) -> Path:
    """Where a package has its weights."""
    return package / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"


def _describe(joined: Any, name: str, alone: Any) -> None:
    function = joined.functions.add(name=name)
    for field in _DESCRIBED:
        getattr(function, field).extend(getattr(alone, field))


def _offsets(function: Any) -> set[int]:
    return {blob.offset for blob in _blobs(function)}


def _blobs(function: Any) -> Iterator[Any]:
    """Every reference of a function to its weight file."""
    for block in function.block_specializations.values():
        for op in all_operations(block.operations):
            arguments = (each for operand in op.inputs.values() for each in operand.arguments)
            for value in (*op.attributes.values(), *(each.value for each in arguments)):
                if value.HasField("blobFileValue"):
                    yield value.blobFileValue
