"""The operations of a Core AI asset, in the words of Core ML, so that the same checks read both."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.manifest import sha256_file
from upcycle.errors import ExportError
from upcycle.program.graph import Function, Graph
from upcycle.program.operation import Operation, TensorType
from upcycle.program.signature import DECODE
from upcycle.program.specification import PROGRAM, reading_product

# Core ML's name of an operation, and of its operands in their order, the last one for all others.
_WORDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "batch_matmul": ("matmul", ("x", "y")),
    "broadcast_in_dims": ("tile", ("x", "reps")),
    "broadcast_to": ("tile", ("x", "reps")),
    "concat": ("concat", ("axis", "values")),
    "conv2d": ("conv", ("x", "weight")),
    "constant": ("const", ()),
    "expand_dims": ("expand_dims", ("x", "axes")),
    "read_handle": ("read_state", ("input", "token")),
    "shrink_dims": ("squeeze", ("x", "axes")),
    "slice": ("slice_by_index", ("x", "bounds")),
    "slice_update": ("slice_update", ("x", "update", "bounds")),
    "write_handle": ("write_state", ("input", "data", "token")),
}
_PREFIX = re.compile(r"^coreai\.(decomposable\.)?(broadcasting_)?")
_TENSOR = re.compile(r"tensor<(?:(?P<shape>[\dx?]+)x)?(?P<kind>\w+?)(?P<bits>\d+)")
_METADATA = "metadata.json"
_KINDS = {"f": "float", "bf": "bfloat", "si": "int", "i": "int", "ui": "uint"}


def read_program(path: Path) -> Graph:
    """Read the program of any `.aimodel`.

    Raises:
        ExportError: it is no Core AI asset, or a damaged one.
    """
    from coreai.authoring import AIModelAsset

    with reading_product(path):
        _check_integrity(path)
    try:
        asset = AIModelAsset.load(path)
    except RuntimeError as error:  # the program's hash is right, so it is not the program
        raise ExportError(
            f"Core AI cannot open {path}: {error}",
            where=str(path / _METADATA),
            fix="export the checkpoint again",
        ) from error
    # There is no public way to the operands of an operation; the extra pins the version.
    module = asset.program._module._mlir_module
    functions = {
        op.attributes["sym_name"].value: _read_function(op)
        for op in (each.operation for each in module.body.operations)
        if op.name == "coreai.graph" and "priv" not in op.attributes  # the others are composites
    }
    return Graph(functions, {}, DECODE if DECODE in functions else next(iter(functions)))


def _check_integrity(path: Path) -> None:
    """Refuse a program that is not the one that was saved: parsing it would end the process."""
    program, digest = path / PROGRAM, path / "main.hash"
    for file in (program, digest, path / _METADATA):
        if not file.is_file():
            raise ExportError(
                f"{path} is no Core AI asset: it has no {file.name}",
                where=str(path),
                fix="name an .aimodel, such as `upcycle export SRC OUT.aimodel` makes",
            )
    if sha256_file(program) != digest.read_bytes().hex():
        raise ExportError(
            f"{program.name} is damaged: its hash is not the one noted in {digest.name}",
            where=str(path),
            fix="export the checkpoint again",
        )


def _read_function(graph: Any) -> Function:
    names: dict[Any, str] = {}
    types: dict[str, TensorType] = {}
    states: dict[str, TensorType] = {}
    (block,) = graph.regions[0].blocks
    for argument, attributes in zip(block.arguments, graph.attributes["arg_attrs"], strict=True):
        name = names[argument] = attributes["coreai.name"].value
        group = states if "handle" in str(argument.type) else types
        group[name] = _tensor_type(argument.type)
    inputs = tuple(types)
    operations: list[Operation] = []
    outputs: tuple[str, ...] = ()
    constants: set[str] = set()
    for op in _flatten(block):
        operands = [names[value] for value in op.operands]
        if op.name == "coreai.output":
            outputs = tuple(operands)
            continue
        made = []
        for value in op.results:
            name = names[value] = f"%{len(names)}"
            types[name] = _tensor_type(value.type)
            made.append(name)
        own = _PREFIX.sub("", op.name)
        kind, keys = _WORDS.get(own, (own, ("x",)))
        if kind == "const" or (operands and constants.issuperset(operands)):
            constants.update(made)
        elif kind == "matmul" and constants.intersection(operands):
            kind = "linear"
        operations.append(Operation(kind, _by_key(keys, operands), tuple(made)))
    return Function(tuple(operations), types, states, {}, inputs, outputs)


def _by_key(keys: tuple[str, ...], operands: list[str]) -> dict[str, tuple[str, ...]]:
    if not keys:
        return {}
    first, last = len(keys) - 1, keys[-1]
    named = {key: (name,) for key, name in zip(keys[:first], operands, strict=False)}
    return named | {last: tuple(operands[first:])}


def _flatten(block: Any) -> Iterator[Any]:
    for op in (each.operation for each in block.operations):
        yield op
        for region in op.regions:
            for inner in region.blocks:
                yield from _flatten(inner)


def _tensor_type(value_type: Any) -> TensorType:
    """Of a tensor, or of the tensor behind a state's handle; a token has no elements."""
    found = _TENSOR.search(str(value_type))
    if found is None:
        return TensorType((0,), "token")
    sizes = (found["shape"] or "").split("x") if found["shape"] else ()
    shape = tuple(None if size == "?" else int(size) for size in sizes)
    return TensorType(shape, f"{_KINDS.get(found['kind'], found['kind'])}{found['bits']}")
