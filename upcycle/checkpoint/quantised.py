"""Tell quantised checkpoints, from the configuration and from the tensors themselves."""

import re
from collections.abc import Iterable, Mapping

from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.errors import FamilyError

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
# Tensors that stand beside, or instead of, the weight of a quantised layer.
_MARKS = {
    "GPTQ or AWQ": re.compile(r"\.(qweight|qzeros|g_idx)$"),
    "bitsandbytes": re.compile(r"\.((nested_)?(absmax|quant_map)|SCB)$|\.quant_state\."),
    "compressed-tensors": re.compile(r"\.weight_(packed|zero_point|global_scale)$"),
    "FP8 or INT8": re.compile(r"\.(weight_scale(_inv|s)?|input_scale|activation_scale)$"),
    "MXFP4": re.compile(r"_blocks$"),
    "HQQ": re.compile(r"\.W_q$"),
    "quanto": re.compile(r"\.weight\._(data|scale)$"),
    "torchao": re.compile(r"weight[:_](qdata|scale)$"),
    "AQLM or VPTQ": re.compile(r"\.(codebooks|codes|centroids)$"),
    "MLX": re.compile(r"\.scales$"),
}


def quantised_tensors(names: Iterable[str]) -> tuple[str, list[str]] | None:
    """The scheme and the tensors that show it, or None where all weights are whole.

    Args:
        names: the names of a checkpoint's tensors.
    """
    names = list(names)
    for scheme, mark in _MARKS.items():
        found = [name for name in names if mark.search(name)]
        if found:
            return scheme, found
    return None


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Refuse a quantised checkpoint: merging needs the full weights.

    Raises:
        FamilyError: the configuration or the tensors say that it is quantised.
    """
    key = next((key for key in _CONFIG_KEYS if checkpoint.config.get(key)), None)
    scheme, names = quantised_tensors(checkpoint.tensors) or ("unknown method", [])
    if names:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        seen, also = f": it has {names[0]}{more}", ""
        where = f"{checkpoint.folder / checkpoint.tensors[names[0]].shard}, {names[0]}"
    elif key:
        seen, also = "", f"; if these are full weights, remove {key}"
        where = f"{checkpoint.folder / CONFIG_FILE}, {key}"
    else:
        return
    section = checkpoint.config.get(key) if key else None
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    told = method if method and isinstance(method, str) else scheme
    raise FamilyError(
        f"the checkpoint is quantised ({told}){seen}; merging needs the full weights",
        where=where,
        fix=f"convert the checkpoint that was quantised, then quantise the result{also}",
    )
