"""OPT with norms before attention and MLP becomes GPTBigCode, whose KV heads are H or 1.

The position table loses its first two rows: no token without padding reads them.
"""

from collections.abc import Container, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from upcycle.families.retargets.pieces import (
    identity_norm,
    linear,
    moved,
    norm,
    output_head,
    split_rows,
    zeros,
)
from upcycle.families.retargets.rule import Made, Part, Retarget, Settings
from upcycle.families.retargets.targets import GPT_BIGCODE

if TYPE_CHECKING:
    from torch import Tensor

_OFFSET = 2  # OPTLearnedPositionalEmbedding.offset
_POST_NORM = "GPTBigCode norms before attention and MLP, and at the end"


def _config(settings: Settings) -> dict[str, Any]:
    settings.head_dim("hidden_size", "num_attention_heads")
    _refuse(settings)
    return {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "multi_query": False,
        "n_embd": settings.count("hidden_size"),
        "n_head": settings.count("num_attention_heads"),
        "n_layer": settings.count("num_hidden_layers"),
        "n_positions": settings.count("max_position_embeddings"),
        "n_inner": settings.count("ffn_dim"),
        "layer_norm_epsilon": 1e-5,  # nn.LayerNorm's own
        "scale_attn_weights": True,
        "resid_pdrop": settings["dropout"],
        "embd_pdrop": 0.0,
        "attn_pdrop": settings["attention_dropout"],
        "initializer_range": settings["init_std"],
        **settings.copied("activation_function"),
    }


def _refuse(settings: Settings) -> None:
    way_out = "the OPT models with do_layer_norm_before (all but opt-350m) can be converted"
    if not settings["do_layer_norm_before"]:
        raise settings.refuse("do_layer_norm_before", _POST_NORM, way_out)
    if settings["_remove_final_layer_norm"]:
        raise settings.refuse("_remove_final_layer_norm", _POST_NORM, way_out)
    if settings["word_embed_proj_dim"] not in (None, settings["hidden_size"]):
        why = "GPTBigCode's embeddings are as wide as its layers"
        raise settings.refuse("word_embed_proj_dim", why, way_out)


def _tensors(settings: Settings, present: Container[str]) -> Iterator[Made]:
    hidden, vocabulary = settings.count("hidden_size"), settings.count("vocab_size")
    positions = settings.count("max_position_embeddings")
    embedding = Part("model.decoder.embed_tokens.weight", (vocabulary, hidden))
    yield moved("transformer.wte.weight", embedding)
    table = Part("model.decoder.embed_positions.weight", (positions + _OFFSET, hidden))
    yield Made(
        "transformer.wpe.weight", (positions, hidden), (table,), lambda tensor: tensor[_OFFSET:]
    )
    for layer in range(settings.count("num_hidden_layers")):
        yield from _layer(settings, f"transformer.h.{layer}", f"model.decoder.layers.{layer}")
    yield from _norm(settings, "transformer.ln_f", "model.decoder.final_layer_norm")
    yield from output_head(settings, present, ("lm_head.weight",), hidden)


def _layer(settings: Settings, ours: str, theirs: str) -> Iterator[Made]:
    hidden, inner = settings.count("hidden_size"), settings.count("ffn_dim")
    biased = bool(settings["enable_bias"])

    def source(module: str, rows: int, columns: int) -> tuple[Part, Part | None]:
        name = f"{theirs}.{module}"
        bias = Part(f"{name}.bias", (rows,)) if biased else None
        return Part(f"{name}.weight", (rows, columns)), bias

    fuse = partial(_fused_rows, heads=settings.count("num_attention_heads"))
    parts = [source(f"self_attn.{role}_proj", hidden, hidden) for role in "qkv"]
    weights = tuple(weight for weight, _ in parts)
    biases = tuple(bias for _, bias in parts if bias)
    name, rows = f"{ours}.attn.c_attn", 3 * hidden
    yield Made(f"{name}.weight", (rows, hidden), weights, fuse)
    if biases:
        yield Made(f"{name}.bias", (rows,), biases, fuse)
    else:
        yield zeros(f"{name}.bias", (rows,), weights[0])
    yield from linear(f"{ours}.attn.c_proj", *source("self_attn.out_proj", hidden, hidden))
    yield from linear(f"{ours}.mlp.c_fc", *source("fc1", inner, hidden))
    yield from linear(f"{ours}.mlp.c_proj", *source("fc2", hidden, inner))
    yield from _norm(settings, f"{ours}.ln_1", f"{theirs}.self_attn_layer_norm")
    yield from _norm(settings, f"{ours}.ln_2", f"{theirs}.final_layer_norm")


def _norm(settings: Settings, ours: str, theirs: str) -> Iterator[Made]:
    """A norm without an affine becomes one whose affine does nothing."""
    hidden = settings.count("hidden_size")
    if settings["layer_norm_elementwise_affine"]:
        return norm(ours, theirs, hidden)
    return identity_norm(
        ours, Part("model.decoder.layers.0.self_attn.out_proj.weight", (hidden, hidden))
    )


def _fused_rows(*parts: "Tensor", heads: int) -> "Tensor":
    """q, k and v with rows [h][d] to one tensor with rows [h][q, k, v][d]."""
    import torch

    return torch.stack([split_rows(part, heads) for part in parts], 1).flatten(0, 2)


RETARGET = Retarget(
    model_type="opt",
    tokenizer_class="GPT2Tokenizer",
    base_prefix="model.",
    targets=(GPT_BIGCODE,),
    config=_config,
    tensors=_tensors,
)
