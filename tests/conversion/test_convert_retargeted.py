"""Conversions of models whose class cannot share KV heads, through `convert` and `verify`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.families.retarget_sources import SOURCES, WEIGHTS, source_checkpoint, source_model
from tests.tiny import convert
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.verify import verify
from upcycle.errors import PlanError
from upcycle.families import shape_of

PROMPT = torch.tensor([[5, 250, 17, 99, 3, 42]])
NAMES = ["pythia", "neox, sequential", "neox, sequential, partial rotary", "gptj", "codegen"]
MULTI_QUERY = ["gpt2", "opt", "opt, no bias"]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def pool(model: Any, kv_heads: int) -> Any:
    """Give every group of heads its mean K and V, in the source class's own layout."""
    heads = model.config.num_attention_heads

    def share(rows: torch.Tensor) -> torch.Tensor:  # [H, d, ...], back to as many heads
        groups = rows.unflatten(0, (kv_heads, -1)).mean(1)
        return groups.repeat_interleave(heads // kv_heads, 0)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query_key_value" in name:  # rows [h][q, k, v][d]
                rows = parameter.view(heads, 3, -1, *parameter.shape[1:])
                for part in (1, 2):
                    rows[:, part] = share(rows[:, part])
            elif ".qkv_proj" in name:  # rows [4][q, v, k][D / 4]
                parts = parameter.view(4, 3, -1, parameter.shape[1])
                for part in (1, 2):
                    rows = parts[:, part].reshape(heads, -1, parameter.shape[1])
                    parts[:, part] = share(rows).reshape(parts[:, part].shape)
            elif ".c_attn" in name:  # columns [q|k|v][h][d]
                rows = parameter.view(*parameter.shape[:-1], 3, heads, -1).movedim(-2, 0)
                for part in (1, 2):
                    rows[..., part, :] = share(rows[..., part, :])
            elif ".k_proj" in name or ".v_proj" in name:
                rows = parameter.view(heads, -1, *parameter.shape[1:])
                rows.copy_(share(rows))
    return model


def load(folder: Path) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize(
    ("name", "kv_heads"), [*((n, 2) for n in NAMES), *((n, 1) for n in [*NAMES, *MULTI_QUERY])]
)
def test_the_converted_model_is_the_source_with_pooled_heads(
    tmp_path: Path, name: str, kv_heads: int
) -> None:
    source = source_checkpoint(tmp_path / "source", name, max_shard_size="60KB")
    result = convert(source, tmp_path / "out", kv_heads=kv_heads)
    assert result.plan.model_type == SOURCES[name][2]
    converted, reference = load(tmp_path / "out"), pool(source_model(name), kv_heads)
    with torch.no_grad():
        expected = reference(PROMPT).logits
        assert relative(converted(PROMPT).logits, expected) <= 1e-10
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    wanted = reference.generate(PROMPT, **settings)
    for use_cache in (True, False):
        assert torch.equal(converted.generate(PROMPT, use_cache=use_cache, **settings), wanted)

    # Heads that are equal already lose nothing.
    reference.save_pretrained(tmp_path / "equal")
    convert(tmp_path / "equal", tmp_path / "lossless", kv_heads=kv_heads)
    with torch.no_grad():
        assert relative(load(tmp_path / "lossless")(PROMPT).logits, expected) <= 1e-10


@pytest.mark.parametrize(("name", "kv_heads"), [("pythia", 2), ("gptj", 4), ("gpt2", 1)])
def test_verify_proves_the_retarget(tmp_path: Path, name: str, kv_heads: int) -> None:
    source = source_checkpoint(tmp_path / "source", name, dtype=torch.float16)
    convert(source, tmp_path / "out", kv_heads=kv_heads, dtype="bfloat16")
    result = verify(source, tmp_path / "out")
    assert result.passed, result
    assert any("before merging" in check.name for check in result.checks)
    stored = {tensor.dtype for tensor in Checkpoint.open(tmp_path / "out").tensors.values()}
    assert stored == {"BF16"}


def test_verify_compares_tensors_of_any_size(tmp_path: Path) -> None:
    """A view makes tensors in pieces of 4 MiB, files are read in smaller ones."""
    source = source_checkpoint(tmp_path / "source", "gpt2", dtype=torch.float32, vocab_size=24_000)
    convert(source, tmp_path / "out", kv_heads=1)
    assert verify(source, tmp_path / "out").passed
    with safe_open(tmp_path / "out" / WEIGHTS, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors["transformer.wte.weight"].nbytes > 4 << 20
    tensors["transformer.wte.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "out" / WEIGHTS, metadata={"format": "pt"})
    (failed,) = (
        check for check in verify(source, tmp_path / "out").checks if "identical" in check.name
    )
    assert not failed.passed


def test_all_heads_can_be_kept(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "opt", dtype=torch.float32)
    convert(source, tmp_path / "out", kv_heads=4)
    with torch.no_grad():
        expected = source_model("opt").float().double()(PROMPT).logits
        assert relative(load(tmp_path / "out")(PROMPT).logits, expected) <= 1e-10


def test_numbers_of_heads_follow_the_target(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "gpt2")
    assert shape_of(Checkpoint.open(source).config).num_key_value_heads == 4
    with pytest.raises(PlanError, match="2 KV heads") as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert caught.value.fix == "choose one of 1, 4"


def test_a_dtype_is_for_retargets_alone(tmp_path: Path) -> None:
    source = source_checkpoint(tmp_path / "source", "pythia")
    convert(source, tmp_path / "out", kv_heads=2)
    with pytest.raises(PlanError, match="phi"):
        convert(tmp_path / "out", tmp_path / "again", kv_heads=1, dtype="float16")
