"""What needs none of Apple's packages: requests, and the decoder through `torch.export`."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError, OutputError
from upcycle.export.coreai import exporting, programs
from upcycle.export.coreai.exporting import export_coreai
from upcycle.export.loading import load_decoder
from upcycle.export.masks import additive_mask
from upcycle.export.request import check_target
from upcycle.options.export import ExportOptions
from upcycle.parity.check import check_export

CONTEXT = 32


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # a norm's ε, by design
@pytest.mark.parametrize("queries", [1, 4])
def test_the_decoder_gives_the_same_logits_through_torch_export(
    tmp_path: Path, queries: int
) -> None:
    source = Checkpoint.open(tiny_checkpoint(tmp_path / "source", num_key_value_heads=2))
    plain = load_decoder(source, ExportOptions(context=CONTEXT))
    exported = torch.export.export(plain, plain.example_inputs(queries)).module()
    tokens = torch.randint(0, 260, (1, 16), generator=torch.Generator().manual_seed(1)).int()
    found, expected = (
        torch.cat(
            [
                module(
                    tokens[:, start : start + queries],
                    torch.tensor([start], dtype=torch.int32),
                    additive_mask(start, queries, CONTEXT),
                )[0]
                for start in range(0, tokens.shape[1], queries)
            ]
        )
        for module in (exported, plain)
    )
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find_spec", {"coreai": "found"}.get)
    with pytest.raises(ExportError, match=r"Core AI needs coreai_torch.*\n.*\n.*upcycle\[coreai\]"):
        export_coreai(tmp_path, tmp_path / "model.aimodel")
    monkeypatch.setattr(programs, "find_spec", {}.get)
    with pytest.raises(ExportError, match="Core AI needs coreai and coreai_torch"):
        check_export(tmp_path, tmp_path / "model.aimodel")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.mlpackage", {}, "model.mlpackage does not end in .aimodel"),
        (".aimodel", {}, r"names no package\n.*\n  fix: name it model.aimodel"),
        ("model.aimodel", {"dtype": "int8"}, "unknown dtype 'int8'"),
        ("model.aimodel", {"attention": "sdpa"}, "unknown attention 'sdpa'"),
        ("model.aimodel", {"kv_cache": "paged"}, "unknown kv-cache 'paged'"),
        ("model.aimodel", {"context": 0}, "context 0 is not a positive multiple of 32"),
        ("model.aimodel", {"context": 64, "prefill": 64}, "prefill 64 is not between 2 and"),
        ("model.aimodel", {"quantize": "int8"}, "assets have no --quantize"),
        ("model.aimodel", {"untie": True}, "assets have no --untie"),
        ("model.aimodel", {"chunk_size": 10**9}, "assets have no --chunk-size"),
    ],
)
def test_bad_requests_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    dtype = options.pop("dtype", "float16")
    with pytest.raises(ExportError, match=message):
        export_coreai(tmp_path / "none", tmp_path / name, ExportOptions(**options), dtype=dtype)


@pytest.mark.parametrize(
    ("output", "suffix", "chunk_size", "what", "name"),
    [
        ("model", ".mlpackage", None, "model does not end in .mlpackage", "model.mlpackage"),
        ("a/b.onnx", ".mlpackage", None, "b.onnx does not end in", "b.mlpackage"),
        ("a/.mlpackage", ".mlpackage", None, "a/.mlpackage names no package", "model.mlpackage"),
        (".hidden", ".mlpackage", None, ".hidden does not end in", "model.mlpackage"),
        ("", ".aimodel", None, ". names no package", "model.aimodel"),
        ("/", ".mlpackage", None, "/ names no package", "model.mlpackage"),
        ("..", ".mlpackage", None, ".. names no package", "model.mlpackage"),
        ("m.mlpackage", ".mlpackage", 1, "chunks go into a folder", "m,"),
        ("...mlpackage", ".mlpackage", 1, "chunks go into a folder", "model,"),
    ],
)
def test_a_name_that_is_refused_gets_one_that_is_not(
    output: str, suffix: str, chunk_size: int | None, what: str, name: str
) -> None:
    options = ExportOptions(chunk_size=chunk_size)
    with pytest.raises(ExportError) as caught:
        check_target(Path(output), suffix, options)
    assert what in caught.value.what
    assert caught.value.fix.split()[:3] == ["name", "it", name]
    check_target(Path(name.removesuffix(",")), suffix, options)


def test_a_disk_too_small_is_refused_before_apples_writer_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    saved: list[Path] = []
    program = SimpleNamespace(save_asset=lambda asset, metadata: saved.append(asset))
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)._replace(free=weights)  # the graph takes some, too
    monkeypatch.setattr(exporting, "require_coreai", lambda: None)
    monkeypatch.setattr(exporting, "convert_program", lambda *_: program)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OutputError, match=r"cannot write .*m\.aimodel: No space left") as caught:
        export_coreai(source, tmp_path / "m.aimodel", ExportOptions(context=CONTEXT))
    assert len(str(caught.value).splitlines()) == 3
    assert not saved
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
