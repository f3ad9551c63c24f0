"""GPT-NeoX (Pythia, Dolly, RedPajama-INCITE …): three classes, by residual and rotary part.

- Parallel residual: Phi, which has one LayerNorm for attention and MLP. Both of the source's are
  folded into the Linears behind them.
- Sequential residual, rotary on whole heads: Starcoder2, the very same layer.
- Sequential residual, rotary on part of each head: Nemotron, whose norms store γ − 1.

The fused rows lie as [h][q, k, v][d].
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from upcycle.errors import FamilyError
from upcycle.families.retargets.pieces import (
    head_rows,
    identity_norm,
    linear,
    moved,
    norm,
    output_head,
    zeros,
)
from upcycle.families.retargets.rule import Made, Part, Retarget, Settings
from upcycle.families.retargets.targets import NEMOTRON, PHI, STARCODER2

# The target's names of the output projection and of the MLP's two Linears.
_LINEARS = {
    "phi": ("self_attn.dense", "mlp.fc1", "mlp.fc2"),
    "starcoder2": ("self_attn.o_proj", "mlp.c_fc", "mlp.c_proj"),
    "nemotron": ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
}


def _target(settings: Settings) -> str:
    if settings["use_parallel_residual"]:
        return "phi"
    return "starcoder2" if _rope(settings)["partial_rotary_factor"] == 1 else "nemotron"


def _rope(settings: Settings) -> dict[str, Any]:
    """The rotary parameters in their present place, from whichever the checkpoint has."""
    values = settings.values
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise FamilyError(
            f"the rotary parameters are {rope!r}, no JSON object",
            where="config.json, rope_scaling or rope_parameters",
            fix="write them as transformers does",
        )
    rope = dict(rope)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", values["rotary_emb_base"])
    rope.setdefault("partial_rotary_factor", values["rotary_pct"])
    if "original_max_position_embeddings" in values:
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return rope


def _config(settings: Settings) -> dict[str, Any]:
    target = _target(settings)
    head_dim = settings.head_dim("hidden_size", "num_attention_heads")
    factor = _rope(settings)["partial_rotary_factor"]
    if not isinstance(factor, int | float) or not 0 < factor <= 1 or int(head_dim * factor) % 2:
        raise FamilyError(
            f"a rotary part of {factor!r} is no even number of the {head_dim} channels of a head",
            where="config.json, rotary_pct or rope_parameters",
            fix="give the number that the model was made with",
        )
    config = {
        "model_type": target,
        "hidden_size": settings.count("hidden_size"),
        "intermediate_size": settings.count("intermediate_size"),
        "num_hidden_layers": settings.count("num_hidden_layers"),
        "num_attention_heads": settings.count("num_attention_heads"),
        "num_key_value_heads": settings.count("num_attention_heads"),
        **settings.copied(
            "hidden_act", "max_position_embeddings", "attention_dropout", "initializer_range"
        ),
        "rope_parameters": _rope(settings),
    }
    epsilon, dropout = settings["layer_norm_eps"], settings["hidden_dropout"]
    if target == "phi":
        return {
            **config,
            "architectures": ["PhiForCausalLM"],
            "layer_norm_eps": epsilon,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "qk_layernorm": False,
        }
    if target == "starcoder2":
        return {
            **config,
            "architectures": ["Starcoder2ForCausalLM"],
            "norm_epsilon": epsilon,
            "residual_dropout": dropout,
            "embedding_dropout": dropout,
            "sliding_window": None,
            "use_bias": True,
        }
    return {
        **config,
        "architectures": ["NemotronForCausalLM"],
        "head_dim": head_dim,
        "norm_eps": epsilon,
        "attention_bias": True,
        "mlp_bias": True,
    }


def _tensors(settings: Settings, present: Container[str]) -> Iterator[Made]:
    hidden, vocabulary = settings.count("hidden_size"), settings.count("vocab_size")
    target = _target(settings)
    embedding = Part("gpt_neox.embed_in.weight", (vocabulary, hidden))
    yield moved("model.embed_tokens.weight", embedding)
    for layer in range(settings.count("num_hidden_layers")):
        yield from _layer(settings, f"model.layers.{layer}", f"gpt_neox.layers.{layer}")
    final = "final_layernorm" if target == "phi" else "norm"
    keep_norm = _norm_less_one if target == "nemotron" else norm
    yield from keep_norm(f"model.{final}", "gpt_neox.final_layer_norm", hidden)
    yield from output_head(settings, present, ("embed_out.weight", "lm_head.weight"), hidden)
    if target == "phi":
        yield zeros("lm_head.bias", (vocabulary,), embedding)


def _layer(settings: Settings, ours: str, theirs: str) -> Iterator[Made]:
    hidden, inner = settings.count("hidden_size"), settings.count("intermediate_size")
    heads, target = settings.count("num_attention_heads"), _target(settings)
    norms = ("input_layernorm", "post_attention_layernorm")
    attention_out, mlp_in, mlp_out = _LINEARS[target]
    affines = [
        tuple(Part(f"{theirs}.{name}.{leaf}", (hidden,)) for leaf in ("weight", "bias"))
        for name in norms
    ]

    def source(
        module: str, rows: int, columns: int, biased: bool = True
    ) -> tuple[Part, Part | None]:
        name = f"{theirs}.{module}"
        bias = Part(f"{name}.bias", (rows,)) if biased else None
        return Part(f"{name}.weight", (rows, columns)), bias

    biased = bool(settings["attention_bias"])
    before_attention, before_mlp = affines if target == "phi" else (None, None)
    fused = source("attention.query_key_value", 3 * hidden, hidden, biased)
    for part, role in enumerate("qkv"):
        name = f"{ours}.self_attn.{role}_proj"
        pick = head_rows(part, heads)
        yield from linear(name, *fused, rows=hidden, pick=pick, folded=before_attention)
    dense = source("attention.dense", hidden, hidden, biased)
    yield from linear(f"{ours}.{attention_out}", *dense)
    up = source("mlp.dense_h_to_4h", inner, hidden)
    yield from linear(f"{ours}.{mlp_in}", *up, folded=before_mlp)
    yield from linear(f"{ours}.{mlp_out}", *source("mlp.dense_4h_to_h", hidden, inner))
    if target == "phi":
        yield from identity_norm(f"{ours}.input_layernorm", affines[0][0])
        return
    keep_norm = _norm_less_one if target == "nemotron" else norm
    for name in norms:
        yield from keep_norm(f"{ours}.{name}", f"{theirs}.{name}", hidden)


def _norm_less_one(target: str, source: str, hidden_size: int) -> Iterator[Made]:
    """Nemotron's LayerNorm multiplies by 1 + weight."""
    weight, bias = norm(target, source, hidden_size)
    yield Made(
        weight.name, weight.shape, weight.sources, lambda gamma: gamma.double() - 1, rounds=True
    )
    yield bias


RETARGET = Retarget(
    model_type="gpt_neox",
    tokenizer_class="GPTNeoXTokenizer",
    base_prefix="gpt_neox.",
    targets=(PHI, STARCODER2, NEMOTRON),
    config=_config,
    tensors=_tensors,
    defaults={"rotary_emb_base": 10000, "rotary_pct": 0.25},
)
