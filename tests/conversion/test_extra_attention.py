"""Attention outside the decoder's layers: merged, refused or dropped, never kept with old heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.predictors import manifest_of, rewrite, shapes, with_predictor
from tests.regress.folders import get_config, load, logits, pooled, set_config
from tests.tiny import FAMILIES, MULTI_QUERY, convert, tiny_checkpoint
from upcycle.checkpoint.manifest import Manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.cli import convert as _convert  # noqa: F401 - registers the command
from upcycle.cli import inspect as _inspect  # noqa: F401 - registers the command
from upcycle.cli import plan as _plan  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError
from upcycle.families import family_in
from upcycle.families.extra_attention import extra_attention
from upcycle.planning import plan, planner

BLOCKS = [
    "mtp.layers.0", "mtp.layers.0.transformer", "model.mtp.layers.0", "model.mtp_layers.0",
    "model.mtp_block.0", "model.layers.1.mtp_block", "model.layers.2.mtp_block", "mtp_block",
    "model.nextn.0", "draft_model.layers.0", "other.layers.0",
]  # fmt: skip
K = "self_attn.k_proj.weight"


@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_known_by_its_tensors_wherever_it_lies(tmp_path: Path, block: str) -> None:
    source, out = with_predictor(tmp_path / "source", block=block), tmp_path / "out"
    todo = plan(source, kv_heads=2)
    assert [(e.layer, e.module) for e in todo.extra] == [(2, f"{block}.self_attn")]
    convert(source, out, kv_heads=2)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    expected = pooled(before[f"{block}.{K}"].unflatten(0, (4, 16)), 2)[::2].flatten(0, 1)
    assert torch.equal(after[f"{block}.{K}"], expected)
    convert(source, tmp_path / "without", kv_heads=2, drop_extra_attention=True)
    left = {name for name in before if not name.startswith(f"{block}.")}
    assert set(shapes(tmp_path / "without")) == left
    for folder in (out, tmp_path / "without"):
        logits(load(folder))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_merges_its_copy_like_the_layer_itself(
    tmp_path: Path, model_type: str
) -> None:
    """The copy has the very numbers of the layer, so that it must get the same ones."""
    own = {} if model_type in MULTI_QUERY else {"num_key_value_heads": 4}
    source = tiny_checkpoint(tmp_path / "source", model_type, **own)
    checkpoint = Checkpoint.open(source)
    family, shape = family_in(checkpoint), family_in(checkpoint).shape(checkpoint.config)
    names = family.tensor_names(shape.attention_layers[-1], shape)
    copies = {name: f"mtp.layers.0.attn.{role}" for role, name in names.items()}
    rewrite(source, lambda w: w.update({copies[n]: w[n].clone() for n in copies}))
    kv_heads = 1 if model_type in MULTI_QUERY else 2
    convert(source, tmp_path / "out", kv_heads=kv_heads)
    after = load_file(tmp_path / "out" / "model.safetensors")
    target = plan(source, kv_heads=kv_heads).target_shape
    made = family.tensor_names(shape.attention_layers[-1], target)
    assert {n for n in after if n.startswith("mtp.")} == {f"mtp.layers.0.attn.{r}" for r in made}
    for role, name in made.items():
        assert torch.equal(after[f"mtp.layers.0.attn.{role}"], after[name])


def test_all_that_belongs_to_a_dropped_block_goes_with_it(tmp_path: Path) -> None:
    """Ernie 4.5 keeps its norms and its projection beside the block."""
    beside = {"model.mtp_emb_norm.0.weight": (64,), "model.mtp_linear_proj.0.weight": (64, 128)}
    source = with_predictor(
        tmp_path / "source", "ernie4_5_moe", "model.mtp_block.0", others=beside,
        config={"num_nextn_predict_layers": 1, "mtp_num_layers": 1},
    )  # fmt: skip
    out = tmp_path / "out"
    result = convert(source, out, kv_heads=2, drop_extra_attention=True)
    assert not [name for name in shapes(out) if "mtp" in name]
    assert result.plan.dropped_tensors == len(shapes(source)) - len(shapes(out))
    changed = {"num_key_value_heads": 2, "num_nextn_predict_layers": 0, "mtp_num_layers": 0}
    assert get_config(out) == {**get_config(source), **changed}
    assert verify(source, out).passed
    assert manifest_of(out)["options"]["drop_extra_attention"] is True


def test_dropping_alone_changes_nothing_else(tmp_path: Path) -> None:
    source, out = with_predictor(tmp_path / "source"), tmp_path / "out"
    convert(source, out, kv_heads=4, drop_extra_attention=True)
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() - after.keys() == {name for name in before if name.startswith("mtp.")}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert verify(source, out).passed


def remove(role: str) -> Any:
    return lambda weights: weights.pop(f"mtp.layers.0.self_attn.{role}")


def replace_by(role: str, *shape: int) -> Any:
    name = f"mtp.layers.0.self_attn.{role}"
    return lambda weights: weights.update({name: torch.ones(shape)})


def fuse(weights: dict[str, torch.Tensor]) -> None:
    parts = [weights.pop(f"mtp.layers.0.self_attn.{role}_proj.weight") for role in "qkv"]
    weights["mtp.layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)


def rename(old: str, new: str) -> Any:
    """Another program's names of the projections."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.startswith("mtp.layers.0.self_attn.")]:
            weights[name.replace(old, new)] = weights.pop(name)

    return change


def in_proj(weights: dict[str, torch.Tensor]) -> None:
    fuse(weights)
    module = "mtp.layers.0.self_attn"
    weights[f"{module}.in_proj_weight"] = weights.pop(f"{module}.qkv_proj.weight")


BEYOND = {
    "no o_proj": (remove("o_proj.weight"), "it has no o_proj.weight"),
    "no k_norm": (remove("k_norm.weight"), "it has no k_norm.weight"),
    "two inputs": (
        replace_by("k_proj.weight", 64, 128), r"k_proj.weight is \[64, 128\], the decoder's \[64",
    ),
    "other heads": (replace_by("v_proj.weight", 96, 64), r"v_proj.weight is \[96, 64\]"),
    "a bias": (replace_by("k_proj.bias", 64), "it has k_proj.bias, which the decoder's layers"),
    "fused": (fuse, "it has no q_proj.weight"),
    "fused by torch": (in_proj, "it has no q_proj.weight"),
    "a linear layer inside": (rename("proj.", "proj.linear."), "it has no q_proj.weight"),
    "names of nobody": (rename("_proj", "_map"), "it has no q_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", BEYOND)
def test_what_cannot_be_merged_is_refused_and_can_be_dropped(tmp_path: Path, case: str) -> None:
    change, words = BEYOND[case]
    source = with_predictor(tmp_path / "source")
    rewrite(source, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(source, tmp_path / "out", kv_heads=2)
    assert "mtp.layers.0.self_attn" in caught.value.where
    assert "--drop-extra-attention" in caught.value.fix
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "same", kv_heads=4)  # where heads stay, so may the block
    assert shapes(tmp_path / "same") == shapes(source)
    convert(source, tmp_path / "out", kv_heads=2, drop_extra_attention=True)
    assert verify(source, tmp_path / "out").passed


def test_a_projection_among_the_decoder_s_own_is_refused_for_good(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    rewrite(source, lambda w: w.update({"model.layers.0.k_proj.weight": torch.ones(64, 64)}))
    for drop in (False, True):
        with pytest.raises(CheckpointError, match=r"model\.layers\.0 is attention outside"):
            convert(source, tmp_path / "out", kv_heads=2, drop_extra_attention=drop)


STAYS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "other heads": (
        {"encoder.layers.0.self_attn.k_proj.weight": (48, 48),
         "encoder.layers.0.self_attn.v_proj.weight": (48, 48)},
        {},
    ),
    "cross-attention of another width": (
        {"model.layers.0.cross_attn.k_proj.weight": (32, 96),
         "model.layers.0.cross_attn.v_proj.weight": (32, 96)},
        {},
    ),
    "as many rows by chance": (
        {f"vision_tower.layers.0.self_attn.{r}_proj.weight": (64, 32) for r in "qkv"},
        {},
    ),
    "a tower with the decoder's very shapes": (
        {f"model.vision_tower.layers.0.self_attn.{r}_proj.weight": (64, 64) for r in "qkvo"},
        {},
    ),
    "a configuration of its own": (
        {f"vision_tower.layers.0.self_attn.{r}_proj.weight": (64, 64) for r in "kv"}
        | {f"vision_tower.layers.0.self_attn.{r}_proj.weight": (64, 64) for r in "qo"},
        {"vision_config": {"num_attention_heads": 4}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYS)
def test_attention_of_another_model_stays(tmp_path: Path, case: str) -> None:
    tensors, config = STAYS[case]
    source = tiny_checkpoint(tmp_path / "source")
    rewrite(source, lambda w: w.update({n: torch.randn(s) for n, s in tensors.items()}))
    set_config(source, **config)
    convert(source, tmp_path / "out", kv_heads=2, drop_extra_attention=True)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in tensors)
    assert verify(source, tmp_path / "out").passed


def test_a_block_that_a_plan_forgets_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_predictor(tmp_path / "source")
    monkeypatch.setattr(planner, "extra_attention", lambda *_: ())
    with pytest.raises(AssertionError, match=r"mtp\.layers\.0\.self_attn\.k_proj\.weight keeps"):
        convert(source, tmp_path / "out", kv_heads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_text_shapes_the_layers_and_weights_alone_the_block(tmp_path: Path) -> None:
    for block in ("mtp.layers.0", "model.layers.1.mtp_block"):
        source = with_predictor(tmp_path / block / "source", block=block)
        out = tmp_path / block / "out"
        command = ["convert", source, out, "--kv-heads", 2, "--calibration", "builtin"]
        command += ["--calibration-tokens", 1024, "--refine", 2]
        answer = CliRunner().invoke(app, list(map(str, command)))
        assert answer.exit_code == 0, answer.output
        said = " ".join(answer.stdout.split())
        assert (
            "attention outside the decoder's layers, merged by mean from weights alone, since "
            f"transformers cannot run it on text: {block}.self_attn"
        ) in said
        before = load_file(source / "model.safetensors")
        after = load_file(out / "model.safetensors")
        expected = pooled(before[f"{block}.{K}"].unflatten(0, (4, 16)), 2)[::2].flatten(0, 1)
        assert torch.equal(after[f"{block}.{K}"], expected)
        record = manifest_of(out)["result"]["extra_attention"]
        assert record == [{"module": f"{block}.self_attn", "layer": 2, "method": "mean"}]
        assert verify(source, out).passed


def test_files_of_any_size_and_a_run_that_was_stopped_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_predictor(tmp_path / "source", others={"mtp.fc.weight": (64, 128)})
    convert(source, tmp_path / "whole", kv_heads=2)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    options: dict[str, Any] = {"kv_heads": 2, "max_shard_size": 60_000}
    write = Manifest.write

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("stopped")

    monkeypatch.setattr(Manifest, "write", fail)
    with pytest.raises(OSError, match="stopped"):
        convert(source, tmp_path / "out", resume=True, **options)
    monkeypatch.setattr(Manifest, "write", write)
    result = convert(source, tmp_path / "out", resume=True, **options)
    assert result.resumed_shards == len(result.plan.shards) > 2
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_file_of_which_nothing_is_left_is_not_written(tmp_path: Path) -> None:
    """Qwen3-Next keeps its block in a file of its own."""
    whole = with_predictor(tmp_path / "whole")
    convert(whole, tmp_path / "source", kv_heads=4, max_shard_size=60_000)
    (tmp_path / "source" / "upcycle.json").unlink()
    only = {
        path.name
        for path in (tmp_path / "source").glob("*.safetensors")
        if all(name.startswith("mtp.") for name in load_file(path))
    }
    assert only
    convert(tmp_path / "source", tmp_path / "out", kv_heads=2, drop_extra_attention=True)
    assert not only & {path.name for path in (tmp_path / "out").iterdir()}
    assert not [name for name in Checkpoint.open(tmp_path / "out").tensors if "mtp" in name]


def test_nan_in_the_block_is_named(tmp_path: Path) -> None:
    source = with_predictor(tmp_path / "source")
    rewrite(source, lambda w: w[f"mtp.layers.0.{K}"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.self_attn\.k_proj\.weight"):
        convert(source, tmp_path / "out", kv_heads=2)


def test_commands_say_what_becomes_of_it(tmp_path: Path) -> None:
    source = with_predictor(tmp_path / "source")

    def said(*words: object) -> str:
        answer = CliRunner().invoke(app, list(map(str, words)))
        assert answer.exit_code == 0, answer.output
        return " ".join(answer.stdout.split())

    line = "attention outside the decoder's layers, {}: mtp.layers.0.self_attn"
    assert line.format("merged like one of them") in said("plan", source, "--kv-heads", 2)
    assert "mtp.layers.0.self_attn.k_proj.weight F32 [32, 64]" in said(
        "plan", source, "--kv-heads", 2
    )
    dropped = "dropped mtp: 11 tensors"
    assert dropped in said("plan", source, "--kv-heads", 2, "--drop-extra-attention")
    assert "outside" not in said("plan", source, "--kv-heads", 4)
    assert "beside the decoder mtp.layers.0.self_attn, converted like a layer" in said(
        "inspect", source
    )
    out = said("convert", source, tmp_path / "out", "--kv-heads", 2)
    assert line.format("merged by mean") in out
    more = said("convert", source, tmp_path / "more", "--kv-heads", 8)
    assert line.format("KV heads repeated") in more
    less = said("convert", source, tmp_path / "less", "--kv-heads", 2, "--drop-extra-attention")
    assert dropped in less
    rewrite(source, remove("o_proj.weight"))
    assert "can only be dropped: it has no o_proj.weight" in said("inspect", source)


def test_a_bare_model_s_block_is_found(tmp_path: Path) -> None:
    source = with_predictor(tmp_path / "source")

    def bare(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            tensor = weights.pop(name)
            if name != "lm_head.weight":
                weights[name.removeprefix("model.")] = tensor

    rewrite(source, bare)
    convert(source, tmp_path / "out", kv_heads=2)
    assert shapes(tmp_path / "out")[f"mtp.layers.0.{K}"] == (32, 64)


def test_numbers_follow_the_names(tmp_path: Path) -> None:
    source = with_predictor(tmp_path / "source", block="mtp.layers.10")
    rewrite(
        source,
        lambda w: w.update(
            {n.replace(".10.", ".9."): t.clone() for n, t in w.items() if n.startswith("mtp.")}
        ),
    )
    checkpoint = Checkpoint.open(source)
    family = family_in(checkpoint)
    found = extra_attention(checkpoint, family, family.shape(checkpoint.config))
    assert [(e.layer, e.module) for e in found] == [
        (2, "mtp.layers.9.self_attn"),
        (3, "mtp.layers.10.self_attn"),
    ]
