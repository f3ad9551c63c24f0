"""Multi-head latent attention: one compressed vector a token and layer, for all heads.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1: the latent of d_c channels gives every head its keys
and values through an up-projection, and d_R more channels carry the rotation for all heads.

Where heads are counted beside a latent, they have all channels that they would have to cache, the
d_R rotary ones of a key too: 128 + 64 and 128 for DeepSeek-V2, whose latent then takes as much as
1.8 heads. The paper's own table leaves those 64 out and so has 2.25.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.attention import AttentionShape, Rope
from upcycle.errors import FamilyError
from upcycle.families.family import Family

_DIMS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class Latent:
    """What is cached instead of keys and values.

    Attributes:
        rank: d_c, channels of the latent.
        rope_dim: d_R, channels of the rotated key that all heads share.
    """

    rank: int
    rope_dim: int

    @property
    def elements(self) -> int:
        """Cached for each token in each layer."""
        return self.rank + self.rope_dim

    def kv_heads(self, shape: AttentionShape) -> float:
        """With how many KV heads of this shape GQA would cache as much."""
        return self.elements / (shape.head_dim + shape.value_head_dim)

    def groups(self, shape: AttentionShape) -> float:
        """The same as DeepSeek-V2's table 1 counts, heads without d_R."""
        return self.elements / (shape.head_dim - self.rope_dim + shape.value_head_dim)


def latent_attention(config: Mapping[str, Any]) -> tuple[AttentionShape, Latent]:
    """The attention of a model with a latent; its heads are those after the up-projection.

    Raises:
        FamilyError: a dimension is missing or no positive number.
    """
    for key in (*_SIZES, *_DIMS):
        if type(config.get(key)) is not int or config[key] < 1:
            raise FamilyError(
                f"{key} is {config.get(key)!r}, not a positive whole number",
                where=f"config.json, {key} (model_type {config.get('model_type')})",
                fix=f"latent attention is counted from {', '.join(_DIMS)}",
            )
    rank, rotated, plain, value = (config[key] for key in _DIMS)
    shape = AttentionShape(
        num_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_attention_heads"],
        head_dim=plain + rotated,
        value_head_dim=value,
        hidden_size=config["hidden_size"],
        rope=Rope("interleaved", rotated),
        qkv_bias=False,
        output_bias=False,
    )
    return shape, Latent(rank, rotated)


# Classes whose layers all cache one latent and nothing else.
FAMILIES = tuple(
    Family(model_type, latent=True)
    for model_type in (
        "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "minicpm3", "mistral4",
        "sarvam_mla", "youtu",
    )
)  # fmt: skip
