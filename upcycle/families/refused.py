"""Kinds of model that cannot be converted: how each is recognised, why, and the way out.

The name of a model type says most. A configuration key that marks a kind counts for every other
type, those of families among them, since one class may hold both (Falcon).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upcycle.errors import FamilyError
from upcycle.families import latent

_AS_ITSELF = "convert a model whose class in transformers has num_key_value_heads, such as llama"
_DECODER_ONLY = "convert a decoder-only model, such as llama"
_TEXT_MODEL = (
    "save the text model alone: text = AutoModelForCausalLM.from_config(model.config.text_config), "
    "then text.model = model.model.language_model, text.lm_head = model.lm_head, "
    "text.save_pretrained(FOLDER); convert FOLDER"
)


@dataclass(frozen=True)
class Refusal:
    """A kind of model that has nothing to merge, or whose merged form no plain class can load.

    Attributes:
        kind: its short name.
        reason: completes "model_type x cannot be converted: …".
        way_out: what the user can do instead.
        model_types: values of `model_type` that are of this kind.
        keys: configuration keys that, when set, make any model one of this kind.
    """

    kind: str
    reason: str
    way_out: str
    model_types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def key_in(self, config: Mapping[str, Any]) -> str | None:
        """The first of `keys` that a configuration sets, or None."""
        return next((key for key in self.keys if config.get(key)), None)

    def error(self, config: Mapping[str, Any]) -> FamilyError:
        """The error to raise for a configuration of this kind, with the value that tells."""
        key = self.key_in(config)
        seen = "model_type" if key is None else f"{key} is {_short(config[key])}"
        return FamilyError(
            f"model_type {config.get('model_type')!r} cannot be converted: {self.reason}",
            where=f"config.json, {seen}",
            fix=self.way_out,
        )


def refusal(config: Mapping[str, Any], *, supported: bool = False) -> Refusal | None:
    """Why a raw `config.json` cannot be converted, or None.

    Args:
        config: the parsed `config.json`.
        supported: the model type is a family, so that only the keys count.
    """
    model_type = config.get("model_type")
    named = [] if supported else [r for r in REFUSALS if model_type in r.model_types]
    return next(iter([*named, *(r for r in REFUSALS if r.key_in(config))]), None)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = value.get("model_type")
        return f"a {inner!r} model" if inner else f"an object of {len(value)} keys"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# A kind that a key reveals stands before those that hold for whole wrappers.
REFUSALS = (
    Refusal(
        kind="multi-head latent attention",
        reason="MLA caches one compressed latent a token for all heads, so there are no KV heads "
        "to merge; num_key_value_heads in its config is not used",
        way_out="nothing to do: its cache is already smaller than MQA's heads would make it; "
        "lower the latent by training, not by merging",
        keys=("kv_lora_rank",),
        model_types=(
            *(family.model_type for family in latent.FAMILIES),
            "axk1", "axk2", "bailing_hybrid", "deepseek_v32", "dots3_note_text", "glm_moe_dsa",
            "hy_v4", "kimi_linear", "longcat_flash",
        ),
    ),
    Refusal(
        kind="one tensor for keys and values",
        reason="it already caches a single KV head that serves as key and value at once",
        way_out="nothing to do: there is no smaller number of KV heads than one",
        model_types=("deepseek_v4",),
    ),
    Refusal(
        kind="encoder-decoder",
        reason="it is an encoder-decoder, and no conversion here covers an encoder or what "
        "reads it",
        way_out=_DECODER_ONLY,
        keys=("is_encoder_decoder",),
        model_types=("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"),
    ),
    Refusal(
        kind="encoder-decoder with KV heads",
        reason="its class has num_key_value_heads for the decoder, but the heads that attend over "
        "the encoder would have to be merged too, which no conversion here covers",
        way_out=_DECODER_ONLY,
        model_types=("canary", "cohere_asr", "dia", "t5gemma", "t5gemma2"),
    ),
    Refusal(
        kind="Moonshine",
        reason="its class shapes the queries by the number of KV heads, so that it runs only with "
        "as many of them as query heads",
        way_out=_DECODER_ONLY,
        model_types=("moonshine", "moonshine_streaming"),
    ),
    Refusal(
        kind="encoder-decoder without KV heads",
        reason="its decoder attends over an encoder with a second set of heads, and its class "
        "has no num_key_value_heads for the decoder",
        way_out=_DECODER_ONLY,
        model_types=(
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "florence2", "fsmt",
            "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "musicgen", "musicgen_melody",
            "mvp", "nllb-moe", "pegasus", "pegasus_x", "pix2struct", "plbart", "pop2piano",
            "prophetnet", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5",
            "switch_transformers", "t5", "trocr", "udop", "umt5", "whisper",
        ),
    ),
    Refusal(
        kind="Falcon's new decoder",
        reason="it is grouped already, and FalconForCausalLM repeats its KV heads to all query "
        "heads before it caches them, so the cache would not shrink",
        way_out="run it where grouped heads are cached as they are; a Falcon without "
        "new_decoder_architecture (falcon-rw) can be converted",
        keys=("new_decoder_architecture",),
    ),
    Refusal(
        kind="KV heads shared between layers",
        reason="some of its layers read the keys and values of another layer, so merging one "
        "layer's heads changes several",
        way_out="nothing to do: sharing between layers already makes its cache smaller",
        keys=("num_kv_shared_layers",),
        model_types=("gemma3n_text", "gemma4_assistant", "gemma4_unified_assistant"),
    ),
    Refusal(
        kind="attention that differs between layers",
        reason="its layers have different numbers or sizes of heads, and one "
        "num_key_value_heads cannot say that",
        way_out="convert a model whose layers all have the same heads; transformers has no plain "
        "class that takes a list of KV heads",
        keys=("per_layer_config", "block_configs"),
        model_types=("gemma4_text", "gemma4_unified_text", "laguna", "mimo_v2_flash", "openelm"),
    ),
    Refusal(
        kind="multimodal wrapper",
        reason="it wraps a text model together with models for images or sound",
        way_out=_TEXT_MODEL,
        keys=("text_config", "llm_config"),
        model_types=(
            "blt", "chameleon", "dots3_note", "emu3", "evolla", "gemma3", "gemma3n", "gemma4",
            "gemma4_unified", "git", "got_ocr2", "idefics", "kyutai_speech_to_text", "llama4",
            "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal", "pi0", "qwen3_5",
            "qwen3_5_moe", "qwen4_exp",
        ),
    ),
    Refusal(
        kind="recurrent",
        reason="it keeps a recurrent state of fixed size and has no attention, so there is no KV "
        "cache to shrink",
        way_out="nothing to do: its state does not grow with the context",
        model_types=(
            "falcon_mamba", "mamba", "mamba2", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm",
        ),
    ),
    Refusal(
        kind="attention shared by layers of a hybrid",
        reason="one attention block serves several layers and reads twice the hidden size",
        way_out="convert a hybrid whose attention layers stand alone, such as jamba",
        model_types=("zamba", "zamba2"),
    ),
    Refusal(
        kind="class that contradicts itself",
        reason="BambaForCausalLM gives other logits with its cache than without it, converted or "
        "not, so that no conversion can be verified",
        way_out="convert a hybrid whose class does not, such as falcon_h1, jamba or qwen3_next",
        model_types=("bamba",),
    ),
    Refusal(
        kind="hybrid that is not covered",
        reason="recurrent layers alternate with attention whose tensors are not described here",
        way_out="convert a hybrid that is, such as falcon_h1, jamba or qwen3_next",
        model_types=(
            "lara_mini", "lfm3", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
            "qwen3_5_text", "qwen4_exp_text", "recurrent_gemma",
        ),
    ),
    Refusal(
        kind="convolved keys and values",
        reason="a learned convolution mixes every key and value channel with earlier tokens, and "
        "heads that were convolved apart have no common mean",
        way_out=_AS_ITSELF,
        model_types=("inkling2_loop_text", "inkling2_text", "inkling_text", "zaya"),
    ),
    Refusal(
        kind="sparse attention chosen for each KV head",
        reason="a learned indexer picks the blocks of tokens that each KV head reads, so merged "
        "heads would need one choice where the model learned several",
        way_out=_AS_ITSELF,
        model_types=("minimax_m3_vl_text",),
    ),
    Refusal(
        kind="differential attention",
        reason="it subtracts the attention of one half of the heads from the other's and pairs "
        "their values, so neighbouring heads are no group",
        way_out=_AS_ITSELF,
        model_types=("diffllama",),
    ),
    Refusal(
        kind="learned mask for each KV head",
        reason="each KV head masks tokens by learned weights over all values, which are not "
        "linear in the heads and cannot be averaged",
        way_out=_AS_ITSELF,
        model_types=("doge",),
    ),
    Refusal(
        kind="mixture of attention heads",
        reason="its query heads are experts that a router picks and that read the KV heads in "
        "turn (0 1 0 1), not in contiguous groups",
        way_out=_AS_ITSELF,
        model_types=("jetmoe",),
    ),
    Refusal(
        kind="looped layers",
        reason="the same attention runs several times with its own cache each time",
        way_out=_AS_ITSELF,
        model_types=("dory", "hrm_text"),
    ),
    Refusal(
        kind="BLOOM",
        reason="BloomForCausalLM has no KV heads, and the other class with ALiBi (Falcon) scales "
        "the bias together with the scores, so it computes something else",
        way_out=_AS_ITSELF,
        model_types=("bloom",),
    ),
    Refusal(
        kind="MPT",
        reason="MptForCausalLM has no KV heads: kv_n_heads exists only in remote code",
        way_out=_AS_ITSELF,
        model_types=("mpt",),
    ),
    Refusal(
        kind="Persimmon",
        reason="PersimmonForCausalLM has no KV heads, and no other class has its norms of "
        "queries and keys together with its squared ReLU",
        way_out=_AS_ITSELF,
        model_types=("fuyu", "persimmon"),
    ),
    Refusal(
        kind="DBRX",
        reason="it is grouped already, and its KV heads stand inside attn_config, with all three "
        "projections clipped and fused in one tensor",
        way_out=_AS_ITSELF,
        model_types=("dbrx",),
    ),
    Refusal(
        kind="ternary weights",
        reason="its projections are rounded to -1, 0 and 1 whenever they run, and the mean of "
        "several such heads is none",
        way_out=_AS_ITSELF,
        model_types=("bitnet",),
    ),
    Refusal(
        kind="attention that is not described",
        reason="its class has num_key_value_heads, but its tensors are not described here, and a "
        "merge that was never compared with the class could be silently wrong",
        way_out="describe them as a Family of a package of your own, registered through the entry "
        "point upcycle.families",
        model_types=("apertus1p5_text", "beam", "cohere_compass_text", "flint"),
    ),
    Refusal(
        kind="positions inside the attention",
        reason="each head adds learned position scores or hashes its tokens, and its class has "
        "no num_key_value_heads",
        way_out=_AS_ITSELF,
        model_types=("cpmant", "reformer", "xlnet"),
    ),
    Refusal(
        kind="GPT-Neo",
        reason="GPTNeoForCausalLM has no KV heads, does not scale its scores, and alternates "
        "global with local layers, which no class with KV heads does",
        way_out="convert gptj or gpt_neox (Pythia), which map exactly onto a class with KV heads",
        model_types=("gpt_neo",),
    ),
    Refusal(
        kind="GPT-SW3",
        reason="the name stands for its tokenizer; its class is GPT-2's, and its checkpoints "
        "say gpt2",
        way_out='set "model_type": "gpt2" in config.json, as save_pretrained() does',
        model_types=("gpt-sw3",),
    ),
    Refusal(
        kind="class without KV heads",
        reason="its class has no num_key_value_heads, so that transformers could not load the "
        "result, and no exact map onto another class is known here",
        way_out="convert gpt2, opt, gptj, codegen or gpt_neox, which have such a map, or a model "
        "whose class has num_key_value_heads",
        model_types=(
            "biogpt", "ctrl", "gpt_neox_japanese", "modernbert-decoder", "openai-gpt",
            "xglm",
        ),
    ),
    Refusal(
        kind="encoder-only",
        reason="it reads its whole input at once and keeps no KV cache, so fewer KV heads save "
        "no memory",
        way_out=_DECODER_ONLY,
        model_types=(
            "albert", "bert", "bert-generation", "big_bird", "camembert", "convbert",
            "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm",
            "esmc", "eurobert", "flaubert", "fnet", "funnel", "gte", "ibert",
            "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert",
            "modernbert", "mpnet", "mra", "neomme", "nomic_bert", "nystromformer", "perceiver",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert",
            "tapas", "ultrabert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
        ),
    ),
    Refusal(
        kind="remote code",
        reason="transformers has no class of this name: it is loaded by code that comes with the "
        "checkpoint, whose layout only that code knows",
        way_out="save it as a class of transformers with its authors' script (InternLM2 can become "
        "llama), and convert that",
        model_types=(
            "btlm", "codeshell", "deci", "deepseek", "gpt_refact", "internlm2", "jais", "moss",
            "nemotron-nas", "phi3small", "telechat", "yuan",
        ),
    ),
)  # fmt: skip
