"""GPT-J and CodeGen: one LayerNorm, parallel residual, interleaved rotary planes. They become Phi.

CodeGen fuses its rows as [p][q, v, k][D / 4] with p over the four machines it was trained on.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from upcycle.families.retargets.pieces import (
    half_split_rows,
    linear,
    moved,
    norm,
    output_head,
    split_rows,
)
from upcycle.families.retargets.rule import GPT_KEYS, Made, Part, Retarget, Settings
from upcycle.families.retargets.targets import PHI

if TYPE_CHECKING:
    from torch import Tensor

_CODEGEN_PARTS = 4


def _config(settings: Settings) -> dict[str, Any]:
    head_dim = settings.head_dim("n_embd", "n_head")
    rotary_dim = settings["rotary_dim"]
    if not isinstance(rotary_dim, int) or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise settings.refuse(
            "rotary_dim",
            f"it must be an even number up to head_dim {head_dim}",
            "give the number that the model was made with",
        )
    factor = rotary_dim / head_dim
    if int(head_dim * factor) < rotary_dim:  # how Phi gets back to whole channels
        factor = math.nextafter(factor, 1)
    return {
        "model_type": "phi",
        "architectures": ["PhiForCausalLM"],
        "hidden_size": settings.count("n_embd"),
        "intermediate_size": settings.inner(),
        "num_hidden_layers": settings.count("n_layer"),
        "num_attention_heads": settings.count("n_head"),
        "num_key_value_heads": settings.count("n_head"),
        "max_position_embeddings": settings.count("n_positions"),
        "hidden_act": settings["activation_function"],
        "layer_norm_eps": settings["layer_norm_epsilon"],
        "attention_dropout": settings["attn_pdrop"],
        **settings.copied("resid_pdrop", "embd_pdrop", "initializer_range"),
        "qk_layernorm": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": factor,
        },
    }


def _tensors(settings: Settings, present: Container[str]) -> Iterator[Made]:
    hidden, vocabulary = settings.count("n_embd"), settings.count("vocab_size")
    yield moved("model.embed_tokens.weight", Part("transformer.wte.weight", (vocabulary, hidden)))
    for layer in range(settings.count("n_layer")):
        yield from _layer(settings, f"model.layers.{layer}", f"transformer.h.{layer}")
    yield from norm("model.final_layernorm", "transformer.ln_f", hidden)
    yield from output_head(settings, present, ("lm_head.weight",), hidden)
    yield moved("lm_head.bias", Part("lm_head.bias", (vocabulary,)))


def _layer(settings: Settings, ours: str, theirs: str) -> Iterator[Made]:
    hidden, inner, heads = settings.count("n_embd"), settings.inner(), settings.count("n_head")
    rotated = half_split_rows(heads, settings.count("rotary_dim"))
    if settings.model_type == "codegen":
        fused = Part(f"{theirs}.attn.qkv_proj.weight", (3 * hidden, hidden))
        sources = dict.fromkeys("qkv", fused)
    else:
        square = (hidden, hidden)
        sources = {role: Part(f"{theirs}.attn.{role}_proj.weight", square) for role in "qkv"}

    def rows(role: str, tensor: "Tensor") -> "Tensor":
        if settings.model_type == "codegen":
            parts = split_rows(tensor, _CODEGEN_PARTS, 3)
            tensor = parts[:, "qvk".index(role)].flatten(0, 1)
        return tensor if role == "v" else rotated(tensor)

    for role, source in sources.items():
        name = f"{ours}.self_attn.{role}_proj"
        yield from linear(name, source, None, rows=hidden, pick=partial(rows, role))
    yield from linear(
        f"{ours}.self_attn.dense", Part(f"{theirs}.attn.out_proj.weight", (hidden, hidden)), None
    )
    for new, old, shape in (("fc1", "fc_in", (inner, hidden)), ("fc2", "fc_out", (hidden, inner))):
        name = f"{theirs}.mlp.{old}"
        weight, bias = Part(f"{name}.weight", shape), Part(f"{name}.bias", shape[:1])
        yield from linear(f"{ours}.mlp.{new}", weight, bias)
    yield from norm(f"{ours}.input_layernorm", f"{theirs}.ln_1", hidden)


GPTJ = Retarget(
    model_type="gptj",
    tokenizer_class="GPT2Tokenizer",
    base_prefix="transformer.",
    targets=(PHI,),
    config=_config,
    tensors=_tensors,
    aliases=GPT_KEYS,
)
CODEGEN = replace(GPTJ, model_type="codegen")
