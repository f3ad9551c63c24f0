"""Packages of `upcycle export` that must break none of the rules that reports have taught."""

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.export.coreml import export_coreml
from upcycle.options.export import ExportOptions
from upcycle.program.graph import Graph
from upcycle.program.reading import read_graph


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """A tiny Llama with two functions and its cache in states."""
    folder = tmp_path_factory.mktemp("reports")
    source = tiny_checkpoint(folder / "source", num_key_value_heads=2)
    package = folder / "model.mlpackage"
    export_coreml(source, package, ExportOptions(context=64, prefill=16))
    return read_graph(package)


@pytest.fixture(scope="session")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """A tiny Llama whose past K and V are inputs."""
    folder = tmp_path_factory.mktemp("reports")
    source = tiny_checkpoint(folder / "source", num_key_value_heads=2)
    package = folder / "model.mlpackage"
    export_coreml(source, package, ExportOptions(context=64, kv_cache="read-only"))
    return read_graph(package)
