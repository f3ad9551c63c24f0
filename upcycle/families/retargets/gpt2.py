"""GPT-2 (DistilGPT-2, Cerebras-GPT, GPT-SW3 …) becomes GPTBigCode, whose KV heads are H or 1.

The weights of GPT-2 are (in, out) with columns [q|k|v][h][d]; GPTBigCode's are (out, in) with rows
[h][q, k, v][d]. Everything else is the same layer.
"""

import math
from collections.abc import Container, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from upcycle.families.retargets.pieces import moved, norm, output_head, split_rows
from upcycle.families.retargets.rule import GPT_KEYS, Made, Part, Retarget, Settings
from upcycle.families.retargets.targets import GPT_BIGCODE

if TYPE_CHECKING:
    from torch import Tensor


def _config(settings: Settings) -> dict[str, Any]:
    settings.head_dim("n_embd", "n_head")
    if settings["add_cross_attention"]:
        raise settings.refuse(
            "add_cross_attention",
            "GPTBigCode with one KV head has no cross-attention",
            "decoders without cross-attention can be converted",
        )
    return {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "multi_query": False,
        "n_embd": settings.count("n_embd"),
        "n_head": settings.count("n_head"),
        "n_layer": settings.count("n_layer"),
        "n_positions": settings.count("n_positions"),
        "n_inner": settings.inner(),
        "scale_attn_weights": True,
        **settings.copied(
            "activation_function", "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop",
            "initializer_range",
        ),
    }  # fmt: skip


def _tensors(settings: Settings, present: Container[str]) -> Iterator[Made]:
    hidden, vocabulary = settings.count("n_embd"), settings.count("vocab_size")
    for name, rows in (("wte", vocabulary), ("wpe", settings.count("n_positions"))):
        name = f"transformer.{name}.weight"
        yield moved(name, Part(name, (rows, hidden)))
    for layer in range(settings.count("n_layer")):
        yield from _layer(settings, layer)
    yield from norm("transformer.ln_f", "transformer.ln_f", hidden)
    yield from output_head(settings, present, ("lm_head.weight",), hidden)


def _layer(settings: Settings, layer: int) -> Iterator[Made]:
    module, hidden = f"transformer.h.{layer}", settings.count("n_embd")
    inner = settings.inner()
    for name in ("ln_1", "ln_2"):
        yield from norm(f"{module}.{name}", f"{module}.{name}", hidden)
    factor = _query_factor(settings, layer)
    fuse = partial(_fused_rows, heads=settings.count("n_head"), factor=factor)
    for leaf, shape in (("weight", (hidden, 3 * hidden)), ("bias", (3 * hidden,))):
        name = f"{module}.attn.c_attn.{leaf}"
        yield Made(name, shape[::-1], (Part(name, shape),), fuse, rounds=factor != 1)
    for name, rows, columns in (
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", inner, hidden),
        ("mlp.c_proj", hidden, inner),
    ):
        weight, bias = f"{module}.{name}.weight", f"{module}.{name}.bias"
        transposed = Part(weight, (columns, rows))
        yield Made(weight, (rows, columns), (transposed,), lambda tensor: tensor.T)
        yield moved(bias, Part(bias, (rows,)))


def _query_factor(settings: Settings, layer: int) -> float:
    """What q is multiplied by, so that scores are scaled by 1 / sqrt(d) alone.

    GPT-2 may also divide them by the layer's number, or not scale them at all. Other engines do
    not read the keys that say so, and nothing rotates or norms q on its way to the scores.
    """
    head_dim = settings.head_dim("n_embd", "n_head")
    factor = 1.0 if settings["scale_attn_weights"] else math.sqrt(head_dim)
    return factor / (layer + 1) if settings["scale_attn_by_inverse_layer_idx"] else factor


def _fused_rows(columns: "Tensor", *, heads: int, factor: float) -> "Tensor":
    """[…, (q|k|v)(h)(d)] to [(h)(q, k, v)(d), …], with q multiplied by a factor."""
    blocks = split_rows(columns.movedim(-1, 0), 3, heads)
    if factor != 1:
        blocks = blocks.double().clone()
        blocks[0] *= factor
    return blocks.transpose(0, 1).flatten(0, 2)


RETARGET = Retarget(
    model_type="gpt2",
    tokenizer_class="GPT2Tokenizer",
    base_prefix="transformer.",
    targets=(GPT_BIGCODE,),
    config=_config,
    tensors=_tensors,
    aliases=GPT_KEYS,
)
