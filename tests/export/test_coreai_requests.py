"""What needs none of Apple's packages: requests, and the decoder through `torch.export`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.coreai import programs
from upcycle.export.coreai.checking import check_asset
from upcycle.export.coreai.exporting import export_coreai
from upcycle.export.loading import load_decoder
from upcycle.export.masks import additive_mask
from upcycle.export.options import ExportOptions

CONTEXT = 32


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # a norm's ε, by design
@pytest.mark.parametrize("queries", [1, 4])
def test_the_decoder_gives_the_same_logits_through_torch_export(
    tmp_path: Path, queries: int
) -> None:
    source = Checkpoint.open(tiny_checkpoint(tmp_path / "source", num_key_value_heads=2))
    plain, _ = load_decoder(source, ExportOptions(context=CONTEXT))
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
        check_asset(tmp_path, tmp_path / "model.aimodel")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.mlpackage", {}, "model.mlpackage does not end in .aimodel"),
        ("model.aimodel", {"dtype": "int8"}, "unknown dtype 'int8'"),
        ("model.aimodel", {"attention": "sdpa"}, "unknown attention 'sdpa'"),
        ("model.aimodel", {"kv_cache": "paged"}, "unknown kv-cache 'paged'"),
        ("model.aimodel", {"context": 0}, "context 0 is no positive multiple of 32"),
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
