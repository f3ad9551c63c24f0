"""Tensors that are not named as transformers' class names them: what they are, and the way out."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError

# Segments that wrappers of a training run put into the names of what they wrap.
_WRAPPERS = (
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module",
)  # fmt: skip
_WRAPPER = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPERS)})\.")
_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks)\.)(\d+)\.")
_SHOWN = 3
_FOLDER = "renamed"


@dataclass(frozen=True)
class ForeignNames:
    """Names of another program.

    Attributes:
        kind: completes "… is …".
        pattern: what shows it in a name.
        fix: the way to the names of transformers.
    """

    kind: str
    pattern: re.Pattern[str]
    fix: str


_SCRIPT = "run transformers' models/{0} (in its source repository) on the original"
# The first that matches is reported.
KINDS = (
    ForeignNames(
        "a part of a LoRA that was never merged (PEFT's names)",
        re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer)(\.|$)"),
        "merge it and save the whole model: model = model.merge_and_unload(), then "
        "model.save_pretrained(FOLDER); convert FOLDER",
    ),
    ForeignNames(
        "an adapter's tensor that stands beside the model's own",
        re.compile(r"\.(modules_to_save|original_module|ia3_l|vera_lambda_[bd]|adapter_\w+)(\.|$)"),
        "let the program that trained it save the whole model, and convert that",
    ),
    ForeignNames(
        "a part of a weight that torch's pruning or a parametrization holds in pieces",
        re.compile(r"\.(weight|bias)_(orig|mask)$|\.parametrizations\.\w+\.|\.weight_[gv]$"),
        "make the weights whole and save them again: torch.nn.utils.prune.remove or "
        "torch.nn.utils.parametrize.remove_parametrizations for each module, then save_pretrained",
    ),
    ForeignNames(
        "in Meta's own layout",
        re.compile(r"(^|\.)attention\.w[qkvo]\.(weight|bias)$|(^|\.)feed_forward\.w[123]\.weight$"),
        "fetch the repository's Hugging Face folder, or "
        + _SCRIPT.format("llama/convert_llama_weights_to_hf.py")
        + "; renaming alone is wrong, since the rows of q and k lie in another order",
    ),
    ForeignNames(
        "in InternLM2's layout, which fuses q, k and v by group",
        re.compile(r"(^|\.)attention\.wqkv\.(weight|bias)$"),
        "save it as llama with its authors' tools/convert2llama.py, and convert that",
    ),
    ForeignNames(
        "in Baichuan's layout, which fuses q, k and v",
        re.compile(r"\.W_pack\.(weight|bias)$"),
        "split the rows of each W_pack into q_proj, k_proj and v_proj, a third each, and save it "
        "as llama; Baichuan-13B has ALiBi and fits no class",
    ),
    ForeignNames(
        "in the layout of Phi's first revisions",
        re.compile(r"\.mixer\.(Wqkv|out_proj)\.(weight|bias)$"),
        "fetch the repository's current revision, whose tensors are named for transformers' phi",
    ),
    ForeignNames(
        "in GGUF's names",
        re.compile(r"(^|\.)blk\.\d+\.(attn|ffn)_"),
        "fetch the original, or load the .gguf file with transformers (gguf_file=) and save it",
    ),
    ForeignNames(
        "in ChatGLM's layout",
        re.compile(r"^transformer\.encoder\.layers\.\d+\.self_attention\.query_key_value\."),
        "fetch the repository's Hugging Face revision (its name ends in -hf), which is "
        "transformers' glm",
    ),
    ForeignNames(
        "in Megatron's layout",
        re.compile(
            r"\.self_attention\.linear_(qkv|proj)\.(weight|bias)$|"
            r"(^|\.)encoder\.layers\.\d+\.self_attention\.query_key_value\."
        ),
        "export it to Hugging Face with the program that trained it (Megatron Bridge, NeMo), and "
        "convert that",
    ),
    ForeignNames(
        "in fairseq's names",
        re.compile(r"(^|\.)decoder\.(sentence_encoder\.)?layers\.\d+\.self_attn\.(in|q|k|v|out)_proj"),
        "fetch the repository's Hugging Face folder, or use the converter of its model in "
        "transformers' source repository",
    ),
    ForeignNames(
        "in LitGPT's names",
        re.compile(r"(^|\.)transformer\.h\.\d+\.attn\.(attn|qkv|proj)\.(weight|bias)$"),
        "export it with `litgpt convert_from_litgpt`, and convert that",
    ),
    ForeignNames(
        "in torchtune's names",
        re.compile(r"(^|\.)layers\.\d+\.attn\.(q|k|v|output)_proj\.(weight|bias)$"),
        "let torchtune's checkpointer save the Hugging Face format; renaming alone is wrong, since "
        "the rows of q and k lie in another order",
    ),
)  # fmt: skip


def kind_of(names: Iterable[str]) -> tuple[ForeignNames, str] | None:
    """The first kind that any of these names shows, with that name; None where none does."""
    names = list(names)
    shown = ((kind, name) for kind in KINDS for name in names if kind.pattern.search(name))
    return next(shown, None)


def missing_tensor(checkpoint: Checkpoint, name: str, fix: str) -> CheckpointError:
    """The error for a tensor that is not there, with what stands in its place.

    Args:
        checkpoint: where it was looked for.
        name: what the class calls it.
        fix: the way out where nothing else explains it.
    """
    what = f"the checkpoint has no tensor {name}"
    where = str(checkpoint.folder)
    if foreign := kind_of(checkpoint.tensors):
        kind, found = foreign
        return CheckpointError(
            f"{what}; {found} is {kind.kind}", where=f"{where}, {found}", fix=kind.fix
        )
    if renamed := _renamed(checkpoint, name):
        found, words, steps = renamed
        return CheckpointError(
            f"{what}; it has {found}, whose name {words}",
            where=f"{where}, {found}",
            fix=f"rename the tensors into a new folder, and convert that: {_command(where, steps)}",
        )
    layers = _stored_layers(checkpoint, name)
    if 0 < layers <= layer_in(name)[1]:
        return CheckpointError(
            f"{what}: config.json has more layers than the tensors, which have {layers}",
            where=where,
            fix=f"set the number of layers in config.json to {layers}, or fetch what is missing",
        )
    near = _beside(checkpoint, name) or list(checkpoint.tensors)
    seen = f"; it has {listed(near)}" if near else ""
    return CheckpointError(f"{what}{seen}", where=where, fix=fix)


def unknown_tensor(checkpoint: Checkpoint, name: str, what: str, fix: str) -> CheckpointError:
    """The error for a tensor that has no place in the class.

    Args:
        checkpoint: where it is.
        name: its name.
        what: what is wrong with it, where it is of no known kind.
        fix: the way out then.
    """
    kind = kind_of([name])
    if kind is not None:
        what, fix = f"tensor {name} is {kind[0].kind}", kind[0].fix
    return CheckpointError(what, where=f"{checkpoint.folder}, {name}", fix=fix)


def layer_behind(checkpoint: Checkpoint, name: str, total: int) -> CheckpointError:
    """The error for a layer behind the last one that is not known to predict further tokens.

    Args:
        checkpoint: where it is.
        name: one of its tensors.
        total: how many layers the configuration describes.
    """
    layers = _stored_layers(checkpoint, name)
    return unknown_tensor(
        checkpoint,
        name,
        f"tensor {name} lies behind the {total} layers that config.json describes; the tensors "
        f"have {layers}",
        fix=f"set num_hidden_layers to {layers} in config.json; layers of multi-token prediction "
        "behind the last one are known by num_nextn_predict_layers, and left out by "
        "--drop-extra-attention",
    )


def _stored_layers(checkpoint: Checkpoint, name: str) -> int:
    """How many layers the tensors have, by the last one's number, beside the layer of a name."""
    prefix, _ = layer_in(name)
    beside = (layer_in(found) for found in checkpoint.tensors)
    return 1 + max((layer for other, layer in beside if prefix and other == prefix), default=-1)


def layer_in(name: str) -> tuple[str, int]:
    """What stands before the number of a layer, and the number; "" and -1 where there is none."""
    found = _LAYER.match(name)
    return (found[1], int(found[2])) if found else ("", -1)


def listed(names: Sequence[str]) -> str:
    """A few of many names."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _beside(checkpoint: Checkpoint, name: str) -> list[str]:
    """What the checkpoint has in the same module."""
    module = name.rpartition(".")[0].rpartition(".")[0]
    return [found for found in checkpoint.tensors if found.startswith(f"{module}.")]


def _renamed(checkpoint: Checkpoint, name: str) -> tuple[str, str, list[tuple[str, str]]] | None:
    """The tensor under another name, what is wrong with it, and the substitutions that mend it.

    The part of a name from its layer on is what makes it known.
    """
    layer = re.search(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+)$", name)
    tail = layer[1] if layer else name
    wanted = name.removesuffix(tail)
    for found in checkpoint.tensors:
        clean = _WRAPPER.sub("", found)
        if clean != tail and not clean.endswith(f".{tail}"):
            continue
        steps, words = [], []
        if clean != found:
            wrappers = dict.fromkeys(match[0] for match in _WRAPPER.finditer(found))
            words.append(f"has {', '.join(map(repr, wrappers))} of a training wrapper in it")
            steps.append((_WRAPPER.pattern, ""))
        prefix = clean.removesuffix(tail)
        if prefix != wanted:
            # `language_model.model.` loses what stands before the class's own `model.`.
            inside = prefix.endswith(f".{wanted}") or not wanted
            outer = prefix.removesuffix(wanted) if inside else prefix
            instead = "" if inside else f" instead of {wanted!r}"
            words.append(f"begins with {outer!r}{instead}")
            steps.append((f"^{re.escape(outer)}", "" if inside else wanted))
        return found, " and ".join(words), steps
    return None


def _command(folder: str, steps: list[tuple[str, str]]) -> str:
    """A command that writes the folder again with other names, which any shell takes."""
    new = "k"
    for step in steps:
        pattern, replacement = map(json.dumps, step)
        new = f"re.sub({pattern}, {replacement}, {new})"
    code = (
        "import json, re, shutil; from pathlib import Path as P; "
        "from safetensors.torch import load_file as load, save_file as save; "
        f"f, o = P({json.dumps(folder)}), P({json.dumps(_FOLDER)}); n = lambda k: {new}; "
        'shutil.copytree(f, o, ignore=shutil.ignore_patterns("*.safetensors")); '
        '[save({n(k): v for k, v in load(p).items()}, o / p.name, {"format": "pt"}) '
        'for p in f.glob("*.safetensors")]; '
        '[p.write_text(json.dumps({"weight_map": {n(k): v for k, v in '
        'json.loads(p.read_text())["weight_map"].items()}})) '
        'for p in o.glob("*.safetensors.index.json")]'
    )
    return f"python -c {shlex.quote(code)}"
