"""Packages of one function joined, against coremltools' `save_multifunction` of the same ones."""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.export.loading import load_decoder
from upcycle.export.quantize.preparation import prepare_quantization
from upcycle.export.quiet import quiet_coremltools
from upcycle.export.saving import convert_decoder
from upcycle.interpreter.prepare import Loaded
from upcycle.options.export import ExportOptions
from upcycle.program.joining import join_functions, weight_file
from upcycle.program.reading import read_graph
from upcycle.program.specification import read_specification
from upcycle.program.weight_file import GrowingFile

QUERIES = {"main": 1, "prefill": 4}


@pytest.fixture(scope="module", params=[None, "int4", "mixed"])
def parts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Packages of one function each, in fp16 or compressed."""
    folder = tmp_path_factory.mktemp("parts")
    source = Checkpoint.open(tiny_checkpoint(folder / "source", num_hidden_layers=1))
    decoder = load_decoder(source, ExportOptions(context=32))
    prepared = (
        prepare_quantization(source, ExportOptions(quantize=request.param))
        if request.param
        else None
    )
    found = {}
    for name, queries in QUERIES.items():
        model = convert_decoder(decoder, queries)
        found[name] = folder / f"{name}.mlpackage"
        with quiet_coremltools():
            (prepared.compress(model) if prepared else model).save(str(found[name]))
    return found


@pytest.fixture
def joined(parts: dict[str, Path], tmp_path: Path) -> Path:
    copies = {
        name: Path(shutil.copytree(part, tmp_path / part.name)) for name, part in parts.items()
    }
    join_functions(copies, tmp_path / "joined.mlpackage")
    assert not copies["main"].exists()
    return tmp_path / "joined.mlpackage"


def test_it_is_what_coremltools_makes(parts: dict[str, Path], joined: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.mlpackage"
    with quiet_coremltools():
        from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction

        descriptor = MultiFunctionDescriptor()
        for name, part in parts.items():
            descriptor.add_function(str(part), "main", name)
        descriptor.default_function_name = "main"
        save_multifunction(descriptor, str(other))
    ours, theirs = read_specification(joined), read_specification(other)
    assert ours.specificationVersion == theirs.specificationVersion
    ours.description.ClearField("metadata")
    theirs.description.ClearField("metadata")
    assert ours.description == theirs.description
    graphs = [read_graph(package) for package in (joined, other)]
    assert list(graphs[0].functions) == list(graphs[1].functions) == list(QUERIES)
    for name in QUERIES:
        histograms = [graph.functions[name].histogram for graph in graphs]
        assert histograms[0] == histograms[1]


def test_every_constant_is_that_of_its_part(parts: dict[str, Path], joined: Path) -> None:
    whole = Loaded(read_graph(joined))
    for name, part in parts.items():
        found = whole.function(name).constants
        expected = Loaded(read_graph(part)).function("main").constants
        tensors = {key for key, value in expected.items() if isinstance(value, Tensor)}
        assert {key for key, value in found.items() if isinstance(value, Tensor)} == tensors
        assert all(torch.equal(found[key], expected[key]) for key in tensors)


def test_equal_constants_are_stored_once(parts: dict[str, Path], joined: Path) -> None:
    """Here both functions have the same ones, those of `prefill` at other places."""
    functions = read_graph(joined).functions
    offsets = {
        name: {weight.offset for weight in function.weights.values()}
        for name, function in functions.items()
    }
    assert offsets["prefill"] <= offsets["main"] == record_offsets(parts["main"])
    assert weight_file(joined).read_bytes() == weight_file(parts["main"]).read_bytes()


def test_coremltools_reads_the_records_that_were_added(
    parts: dict[str, Path], tmp_path: Path
) -> None:
    """Its own reader refuses a record of another kind or a damaged header."""
    from coremltools.libmilstoragepython import _BlobStorageReader

    file = tmp_path / "weight.bin"
    shutil.copy(weight_file(parts["main"]), file)
    part = parts["prefill"]
    growing = GrowingFile(file, set())  # knows of none, so that it takes each content once
    places = growing.take(weight_file(part), record_offsets(part))
    assert min(places.values()) >= weight_file(parts["main"]).stat().st_size
    assert growing.take(weight_file(part), record_offsets(part)) == places
    count, version = struct.unpack("<II", file.read_bytes()[:8])
    assert count == len(record_offsets(parts["main"])) + len({*places.values()})
    assert version == 2
    readers = [_BlobStorageReader(str(path)) for path in (weight_file(part), file)]
    read = 0
    for kind in ("fp16", "int32", "int16", "uint16", "int8", "uint8", "int4", "uint4", "uint6"):
        for there, here in places.items():
            try:
                expected = getattr(readers[0], f"read_{kind}_data")(there)
            except RuntimeError:  # of another kind
                continue
            assert (getattr(readers[1], f"read_{kind}_data")(here) == expected).all()
            read += 1
    assert read == len(places)


def record_offsets(package: Path) -> set[int]:
    return {weight.offset for weight in read_graph(package).functions["main"].weights.values()}
