"""What `--quantize` takes, and which weight gets what."""

from pathlib import Path

import pytest

from tests.tiny import tiny_model
from upcycle.errors import ExportError
from upcycle.export.quantize.schemes import PRESETS, Quantization, Scheme, load_quantization
from upcycle.export.quantize.weights import (
    assign,
    bits_by_role,
    find_weights,
    is_tied,
    split_palettes,
    untie,
)

INT8 = Scheme(kind="linear", bits=8)
YAML = """\
ffn: {kind: palette, bits: 4, group: 16}
attention: {kind: linear, bits: 4, block: 32}
lm_head: {kind: palette, bits: 6}
overrides:
  - layers: [0, 1]
    attention: null
  - layers: [1]
    ffn: {kind: linear, bits: 8}
promote: {count: 1}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "scheme.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_says_it_by_role_and_layer(tmp_path: Path) -> None:
    quantization = load_quantization(write(tmp_path, YAML))
    four = Scheme(kind="palette", bits=4, group=16)
    assert quantization.scheme("ffn", 0) == four
    assert quantization.scheme("ffn", 1) == INT8
    assert quantization.scheme("attention", 1) is None
    assert quantization.scheme("attention", 2) == Scheme(kind="linear", bits=4, block=32)
    assert quantization.scheme("embedding", None) is None
    assert quantization.scheme("ffn", 2, promoted=[2]) == INT8
    assert quantization.scheme("attention", 0, promoted=[0]) is None, "fp16 is no promotion"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ffn: {kind: palette, bits: 5}", "palette has 4 or 6 or 8 bits, not 5"),
        ("ffn: {kind: linear, bits: 6}", "linear has 4 or 8 bits, not 6"),
        ("ffn: {kind: palette, bits: 4, block: 32}", "palette has no block"),
        ("ffn: {kind: linear, bits: 4, group: 32}", "linear has no group"),
        ("ffn: {kind: palette, bits: '4'}", "scheme.yaml:1: ffn.bits: should be a valid integer"),
        ("ffn: {kind: palette, bits: 4, group: 0}", "greater than 0"),
        ("ffn: {kind: lut, bits: 4}", "should be 'palette' or 'linear'"),
        ("\nmlp: {kind: palette, bits: 4}", "scheme.yaml:2: mlp: unknown key"),
        ("embedding: null", "nothing is quantised"),
        ("overrides: []\n", "nothing is quantised"),
        ("overrides:\n  - layers: [-1]\n    ffn: {kind: linear, bits: 8}", "greater than or equal"),
        ("ffn: {kind: linear, bits: 8}\npromote: {count: 0}", "greater than 0"),
        ("ffn: 4\nffn: 8", "given twice"),
        ("int8", "should have keys of its own"),
        ("", "should have keys of its own"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_quantization(write(tmp_path, text))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ExportError, match=r"no quantisation 'int3'[^$]*int8, int4, lut4"):
        load_quantization("int3")


def test_the_roles_of_a_tied_and_an_untied_model() -> None:
    model = tiny_model(num_hidden_layers=2, tie_word_embeddings=True)
    roles = {weight.name: (weight.role, weight.layer) for weight in find_weights(model)}
    assert is_tied(model)
    assert roles["model.embed_tokens.weight"] == ("lm_head", None), "the more bits of the two"
    assert roles["model.layers.1.self_attn.o_proj.weight"] == ("attention", 1)
    assert roles["model.layers.0.mlp.down_proj.weight"] == ("ffn", 0)
    assert len(roles) == 1 + 2 * 7
    untie(model)
    roles = {weight.name: (weight.role, weight.layer) for weight in find_weights(model)}
    assert not is_tied(model)
    assert roles["model.embed_tokens.weight"] == ("embedding", None)
    assert roles["lm_head.weight"] == ("lm_head", None)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_are_feed_forward_and_routers_stay(model_type: str) -> None:
    weights = find_weights(tiny_model(model_type, num_hidden_layers=1))
    stacks = [weight for weight in weights if weight.stacked]
    assert {weight.role for weight in stacks} == {"ffn"}
    up = next(weight for weight in stacks if "up_proj" in weight.name)
    assert up.inputs == 64
    assert up.transposed == (model_type == "gpt_oss")
    assert not [weight for weight in weights if "router" in weight.name or "gate." in weight.name]


def test_promoted_layers_get_more_bits() -> None:
    weights = find_weights(tiny_model(num_hidden_layers=9))
    schemes = assign(PRESETS["top8"], weights, promoted=range(8))
    assert schemes["model.layers.7.mlp.up_proj.weight"] == INT8
    assert schemes["model.layers.8.mlp.up_proj.weight"].bits == 4
    assert schemes["lm_head.weight"].bits == 6
    said = bits_by_role(weights, schemes)
    assert said["ffn"] == "24 x linear 8-bit, 3 x palette 4-bit by 1"


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    weights = find_weights(tiny_model(num_hidden_layers=1, intermediate_size=88))
    grouped = Quantization(ffn=Scheme(kind="palette", bits=4, group=16))
    with pytest.raises(ExportError, match=r"a group of 16 does not divide 88[^$]*group: 11"):
        assign(grouped, weights)
    narrow = find_weights(tiny_model(num_hidden_layers=1, hidden_size=48, num_attention_heads=4))
    with pytest.raises(ExportError, match=r"a block of 32 does not divide 48[^$]*block: 24"):
        assign(PRESETS["int4"], narrow)


def test_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    weights = find_weights(tiny_model(num_hidden_layers=1))
    with pytest.raises(ExportError, match=r"no layer 1[^$]*0 to 0"):
        assign(load_quantization(write(tmp_path, YAML)), weights)
    with pytest.raises(ExportError, match="8 layers are to be promoted, but there are 1"):
        assign(PRESETS["top8"], weights)


def test_each_part_of_a_split_head_has_its_own_palettes() -> None:
    weights = {weight.name: weight for weight in find_weights(tiny_model(num_hidden_layers=1))}
    head = weights["lm_head.weight"]
    whole = assign(PRESETS["mixed"], weights.values())
    assert split_palettes(whole, weights, 1) == whole
    split = split_palettes(whole, weights, 5)
    assert split.pop(head.name).group == head.channels // 5
    assert split == {name: scheme for name, scheme in whole.items() if name != head.name}
    integers = assign(PRESETS["int8"], weights.values())
    assert split_palettes(integers, weights, 7) == integers
    with pytest.raises(ExportError, match=r"260 output channels.*\n.*\n.*--split-head 5"):
        split_palettes(whole, weights, 7)


def test_a_palette_does_not_span_two_parts() -> None:
    weights = {weight.name: weight for weight in find_weights(tiny_model(num_hidden_layers=1))}
    grouped = Quantization(lm_head=Scheme(kind="palette", bits=4, group=52))
    schemes = assign(grouped, weights.values())
    assert split_palettes(schemes, weights, 5) == schemes
    with pytest.raises(ExportError, match=r"palette 4-bit by 52 do not split into 4 parts"):
        split_palettes(schemes, weights, 4)
