"""The classes that models become, and what engines other than transformers make of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A class that models become.

    Attributes:
        model_type: its `model_type`.
        activation_key: where its configuration names the activation.
        activation: what engines that do not read that key compute, by how its names begin.
        fewer_kv_heads: which engines cannot take the class with fewer KV heads than query heads;
            `{kv_heads}` stands for their number.
        all_kv_heads: the same with as many as query heads.
        reads_rope_scaling: whether mlx-lm does, for this class.
        engines: the same for a table.
    """

    model_type: str
    activation_key: str
    activation: str
    fewer_kv_heads: str = ""
    all_kv_heads: str = ""
    reads_rope_scaling: bool = False
    engines: str = ""

    def cautions(self, config: Mapping[str, Any], kv_heads: int) -> list[str]:
        """What to know before another engine than transformers loads a conversion.

        Args:
            config: the target's configuration.
            kv_heads: g.
        """
        shared = kv_heads < config.get("num_attention_heads", config.get("n_head"))
        found = [(self.fewer_kv_heads if shared else self.all_kv_heads).format(kv_heads=kv_heads)]
        named = config[self.activation_key]
        if not str(named).startswith(self.activation):
            found.append(
                f"{self.model_type} with {self.activation_key} {named}: llama.cpp and mlx-lm do "
                f"not read that key and compute {self.activation}, so their tokens are wrong; "
                "transformers reads it"
            )
        if config.get("rope_scaling") and not self.reads_rope_scaling:
            found.append(
                f"{self.model_type} with a scaled rotation: mlx-lm does not read rope_scaling for "
                "this class, so its tokens are wrong; transformers reads it"
            )
        return [text for text in found if text]


PHI = Target(
    "phi",
    activation_key="hidden_act",
    activation="gelu",
    fewer_kv_heads="phi with fewer KV heads than query heads loads in transformers, vLLM and "
    "mlx-lm; OpenVINO and CTranslate2 fail, and llama.cpp fails until its converter's file is "
    "mended: gguf_set_metadata --force FILE phi2.attention.head_count_kv {kv_heads}",
    engines="vLLM and mlx-lm load it, OpenVINO and CTranslate2 do not; llama.cpp does once its "
    "file is mended: `gguf_set_metadata --force FILE phi2.attention.head_count_kv G`",
)
STARCODER2 = Target(
    "starcoder2", activation_key="hidden_act", activation="gelu", engines="mlx-lm loads it"
)
NEMOTRON = Target(
    "nemotron",
    activation_key="hidden_act",
    activation="relu2",
    engines="llama.cpp and mlx-lm compute relu2 whatever `hidden_act` says: wrong tokens",
)
GPT_BIGCODE = Target(
    "gpt_bigcode",
    activation_key="activation_function",
    activation="gelu",
    all_kv_heads="gpt_bigcode with as many KV heads as query heads: llama.cpp and mlx-lm know the "
    "class with one KV head alone; --kv-heads 1 makes that",
    engines="vLLM, llama.cpp, mlx-lm, CTranslate2 and OpenVINO load it with one KV head; the OPT "
    "models with relu go wrong in llama.cpp and mlx-lm, which compute gelu",
)
