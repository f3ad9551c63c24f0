"""Conversion of whole folders, against transformers' own classes."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from tests.tiny import FAMILIES, MULTI_QUERY, convert, kv_settings, tiny_checkpoint
from upcycle.checkpoint.headers import header_bytes
from upcycle.checkpoint.manifest import hash_folder, read_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.writer import rewrite
from upcycle.errors import CheckpointError, FamilyError, OutputError, PlanError, UpcycleError
from upcycle.families import family_of, shape_of
from upcycle.heads.permute import permute_kv_heads
from upcycle.models.generation import measured_cache_bytes
from upcycle.planning import Attention, plan

NAMES = sorted(FAMILIES)
OVER_HEADS = {"olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2"}
IDS = torch.tensor([[5, 9, 200, 31, 77, 5, 9, 120, 3, 8]])


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def fewer(name: str) -> int:
    """A number of KV heads below 8 that the family knows."""
    return 1 if name in MULTI_QUERY else 2


def pool_and_repeat(model: torch.nn.Module, name: str, groups: int) -> None:
    """Give every head of the *source* class the mean of its group, written without our code."""

    def pooled(heads: torch.Tensor) -> torch.Tensor:  # [8, ...]
        means = heads.double().unflatten(0, (groups, -1)).mean(1)
        return means.repeat_interleave(8 // groups, 0).to(heads.dtype)

    def pool_rows(parameter: torch.Tensor) -> None:
        parameter.copy_(pooled(parameter.unflatten(0, (8, -1))).flatten(0, 1))

    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if ".q_proj" in path or "linear_attn" in path:
                continue
            if ".k_proj." in path or ".v_proj." in path:
                pool_rows(parameter)
            elif "qkv_proj" in path:  # blocks [q | k | v]
                for block in parameter.chunk(3)[1:]:
                    pool_rows(block)
            elif "c_attn" in path or "query_key_value" in path:  # rows [head][q, k, v]
                fused = parameter.view(8, 3, -1, *parameter.shape[1:])
                for part in (1, 2):
                    fused[:, part] = pooled(fused[:, part])
            elif name in OVER_HEADS and ".k_norm." in path:
                pool_rows(parameter)
            elif name == "cohere" and ".k_norm." in path:
                parameter.copy_(pooled(parameter))
        if name == "stablelm":
            for layer in model.model.layers:
                norms = [norm.weight for norm in layer.self_attn.k_layernorm.norms]
                for weight, mean in zip(norms, pooled(torch.stack(norms)), strict=True):
                    weight.copy_(mean)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny checkpoint for each family, dtype and number of KV heads, made once and only read."""

    @cache
    def make(name: str, dtype: torch.dtype = torch.float32, kv_heads: int = 8) -> Path:
        folder = tmp_path_factory.mktemp("sources") / name
        return tiny_checkpoint(folder, name, dtype=dtype, **kv_settings(name, kv_heads))

    return make


@pytest.mark.parametrize("name", NAMES)
def test_as_many_heads_as_before_is_bit_identical(
    tmp_path: Path, sources: Callable[..., Path], name: str
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        source = sources(name, dtype)
        convert(source, tmp_path / str(dtype), kv_heads=8)
        assert hash_folder(tmp_path / str(dtype)) == hash_folder(source)


@pytest.mark.parametrize("name", NAMES)
def test_merged_model_equals_the_source_with_pooled_heads_repeated(
    tmp_path: Path,
    sources: Callable[..., Path],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    source = sources(name)
    convert(source, tmp_path / "out", kv_heads=fewer(name))
    reference = load(source)
    before = logits(reference)
    pool_and_repeat(reference, name, fewer(name))
    converted = load(tmp_path / "out")
    expected = logits(reference)
    assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-2)
    assert shape_of(converted.config.to_dict()).num_key_value_heads == fewer(name)
    record_property("merged", difference := relative(logits(converted), expected))
    assert difference < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_heads_in_another_order_give_the_same_logits(
    tmp_path: Path,
    sources: Callable[..., Path],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    checkpoint = Checkpoint.open(sources(name, kv_heads=8 if name in MULTI_QUERY else 4))
    family = family_of(checkpoint.config)
    shape = family.shape(checkpoint.config)
    order = list(reversed(range(shape.num_key_value_heads)))
    replacements = {}
    for layer in shape.attention_layers:
        names = family.tensor_names(layer, shape)
        weights = family.read({r: checkpoint.read(n) for r, n in names.items()}, shape)
        permuted = family.write(permute_kv_heads(weights, order))
        replacements |= {names[role]: tensor for role, tensor in permuted.items()}
    shutil.copyfile(checkpoint.folder / "config.json", tmp_path / "config.json")
    rewrite(checkpoint, tmp_path, replacements)
    difference = relative(logits(load(tmp_path)), logits(load(checkpoint.folder)))
    record_property("permuted", difference)
    assert difference < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_equal_heads_convert_without_loss(
    tmp_path: Path, sources: Callable[..., Path], name: str
) -> None:
    """A checkpoint whose heads are equal inside each group: raise a grouped one, then lower it."""
    grouped = sources(name, kv_heads=fewer(name))
    convert(grouped, tmp_path / "raised", kv_heads=8)
    torch.testing.assert_close(
        logits(load(tmp_path / "raised")), logits(load(grouped)), rtol=1e-4, atol=1e-4
    )
    before = load_file(grouped / "model.safetensors")
    for method in ("mean", "first"):
        convert(tmp_path / "raised", tmp_path / method, kv_heads=fewer(name), method=method)
        after = load_file(tmp_path / method / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_shrinks_and_generation_agrees_without_it(
    tmp_path: Path, sources: Callable[..., Path], name: str
) -> None:
    source = sources(name)
    convert(source, tmp_path / "out", kv_heads=fewer(name))
    sizes = []
    for folder in (source, tmp_path / "out"):
        model = load(folder)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS, cache=cache, use_cache=True)
        sizes.append(measured_cache_bytes(cache))
    assert sizes[1] * 8 == sizes[0] * fewer(name)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(IDS, use_cache=True, **settings)
    without = model.generate(IDS, use_cache=False, **settings)
    assert torch.equal(with_cache, without)


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2", dtype=torch.float16)
    for name in ("a", "b"):
        convert(source, tmp_path / name, kv_heads=4, method="random", seed=7)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_shards_and_sidecars_are_kept(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "söurce dir", max_shard_size="100KB")
    extra = {"LICENSE": b"mine\r\n", "chat_template.jinja": b"{{ x }}", "tokenizer.model": bytes(9)}
    for name, data in extra.items():
        (source / name).write_bytes(data)
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("notes")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    result = convert(source, tmp_path / "out", kv_heads=2)
    out = tmp_path / "out"
    assert result.left_behind == ["pytorch_model.bin"]
    assert not (out / "pytorch_model.bin").exists()
    for name, data in extra.items():
        assert (out / name).read_bytes() == data
    assert (out / "sub" / "notes.txt").read_text() == "notes"
    before, after = Checkpoint.open(source), Checkpoint.open(out)
    assert [h.path.name for h in after.headers] == [h.path.name for h in before.headers]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == after.weight_bytes
    assert index["weight_map"] == {name: t.shard for name, t in after.tensors.items()}
    assert logits(load(out)).isfinite().all()


def test_only_the_planned_lines_of_the_config_change(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    text = '{\n    "y": 1e-05,   "x": [1,2],\n'
    text += (source / "config.json").read_text().lstrip("{\n")
    (source / "config.json").write_text(text)
    convert(source, tmp_path / "out", kv_heads=4)
    before, after = text.splitlines(), (tmp_path / "out" / "config.json").read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [('  "num_key_value_heads": 8,', '  "num_key_value_heads": 4,')]


@pytest.mark.parametrize("value", ["absent", "null"])
def test_a_config_without_kv_heads_gets_them(tmp_path: Path, value: str) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["num_key_value_heads"]
    if value == "null":
        config["num_key_value_heads"] = None
    (source / "config.json").write_text(json.dumps(config, indent=2))
    convert(source, tmp_path / "out", kv_heads=2)
    expected = {**config, "num_key_value_heads": 2}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected
    assert logits(load(tmp_path / "out")).isfinite().all()


def test_the_manifest_names_its_inputs_and_nothing_of_this_machine(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2, sha256=True)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.options.document == {
        "kv_heads": 2,
        "method": "mean",
        "calibration": [],
        "calibration_weights": [],
        "calibration_tokens": None,
        "calibration_window": None,
        "refine": 0,
        "refine_precision": "fp32",
        "grouping": "contiguous",
        "seed": 0,
        "dtype": None,
        "max_shard_size": None,
        "allow_nonfinite": False,
        "drop_extra_attention": False,
    }
    assert manifest.source.files == hash_folder(source)
    assert manifest.result.files == hash_folder(tmp_path / "out")
    assert len(manifest.source.document["sha256"]["model.safetensors"]) == 64
    assert str(tmp_path) not in (tmp_path / "out" / "upcycle.json").read_text()


def test_a_plan_says_what_convert_writes(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "phi")
    todo = plan(source, kv_heads=1)
    convert(source, tmp_path / "out", kv_heads=1)
    written = Checkpoint.open(tmp_path / "out").tensors
    assert {op.output.name: op.output.shape for op in todo.operations} == {
        name: tensor.shape for name, tensor in written.items()
    }
    merged = [op for op in todo.operations if isinstance(op, Attention)]
    family = family_of({"model_type": "phi"})
    assert len(merged) == 2 * len(family.tensor_shapes(todo.target_shape)) == 2 * 12
    assert json.loads(json.dumps(todo.to_dict()))["num_key_value_heads"] == 1


def shrink_config(folder: Path) -> None:
    edit(folder, num_key_value_heads=1)


def add_layer_9(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.9.self_attn.k_proj.weight"] = torch.ones(64, 64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


BAD = {
    "kv_heads 3": (lambda s: None, {"kv_heads": 3}, PlanError, "1, 2, 4, 8"),
    "kv_heads 0": (lambda s: None, {"kv_heads": 0}, PlanError, "1, 2, 4, 8"),
    "kv_heads 16": (lambda s: None, {"kv_heads": 16}, PlanError, "1, 2, 4, 8"),
    "method": (lambda s: None, {"kv_heads": 2, "method": "median"}, PlanError, "mean"),
    "config only": (shrink_config, {"kv_heads": 1}, CheckpointError, "editing them"),
    "bert": (lambda s: edit(s, model_type="bert"), {"kv_heads": 2}, FamilyError, "llama"),
    "layers": (lambda s: edit(s, num_hidden_layers=3), {"kv_heads": 2}, CheckpointError, "layers"),
    "fewer layers": (
        lambda s: edit(s, num_hidden_layers=1), {"kv_heads": 2}, CheckpointError, "layers",
    ),
    "stray layer": (add_layer_9, {"kv_heads": 2}, CheckpointError, "num_hidden_layers"),
    "bias": (lambda s: edit(s, attention_bias=True), {"kv_heads": 2}, CheckpointError, "biases"),
    "no weights": (
        lambda s: (s / "model.safetensors").unlink(), {"kv_heads": 2}, CheckpointError, "tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_and_writes_nothing(tmp_path: Path, case: str) -> None:
    damage, options, kind, fix = BAD[case]
    source = tiny_checkpoint(tmp_path / "source")
    damage(source)
    with pytest.raises(kind) as caught:
        convert(source, tmp_path / "out", **options)
    assert fix in caught.value.fix
    assert len(str(caught.value).splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_output_that_exists_is_refused_before_any_work(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists"):
        convert(source, tmp_path / "out", kv_heads=2)
    convert(source, tmp_path / "out", kv_heads=2, overwrite=True)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_truncated_shard_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UpcycleError, match="header speaks of"):
        convert(source, tmp_path / "out", kv_heads=2)
    assert not (tmp_path / "out").exists()


def test_line_ends_and_nested_keys_of_the_config_stay(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    path = source / "config.json"
    text = path.read_text().replace("{", '{\n  "draft": {"num_key_value_heads": 7},', 1)
    path.write_bytes(text.replace("\n", "\r\n").encode())
    convert(source, tmp_path / "out", kv_heads=2)
    before, after = path.read_bytes(), (tmp_path / "out" / "config.json").read_bytes()
    old, new = b'"num_key_value_heads": 8,\r\n', b'"num_key_value_heads": 2,\r\n'
    assert after == before.replace(old, new)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": "gptq"},
        {"initializer_range": None},
        {"initializer_range": "x"},
        {"partial_rotary_factor": "a"},
    ],
)
def test_a_config_of_wrong_types_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    edit(source, **changes)
    with pytest.raises(FamilyError):
        convert(source, tmp_path / "out", kv_heads=2)


def test_the_order_of_tensors_in_a_file_changes_nothing_else(tmp_path: Path) -> None:
    """A file that has all q, then all k, … gives the same tensors, in its own order."""
    source = tiny_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "out", kv_heads=2)
    scattered = tiny_checkpoint(tmp_path / "scattered")
    original = Checkpoint.open(source)
    specs = sorted(original.tensors.values(), key=lambda tensor: tensor.name[::-1])
    header = header_bytes(specs, {"format": "pt"})
    data = b"".join(chunk for spec in specs for chunk in original.chunks(spec.name))
    (scattered / "model.safetensors").write_bytes(header + data)
    convert(scattered, tmp_path / "out-scattered", kv_heads=2)
    first = load_file(tmp_path / "out" / "model.safetensors")
    second = load_file(tmp_path / "out-scattered" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    written = Checkpoint.open(tmp_path / "out-scattered").headers[0].tensors
    assert [tensor.name for tensor in written] == [spec.name for spec in specs]
