"""Folders whose weights another program laid out: what each is, and the way out of it."""

import json
import os
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from upcycle.checkpoint.files import not_listed
from upcycle.errors import CheckpointError

# Weights in any format.
WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".tflite", ".npz",
}  # fmt: skip


@dataclass(frozen=True)
class ForeignKind:
    """A layout that is not converted as it lies there.

    Attributes:
        name: what it is.
        patterns: shell patterns of file names, any of which shows it.
        fix: the way to a safetensors folder; `{folder}` and `{file}` are what was found.
        code: Python that goes this way, with the same fields as literals; printed as a command.
    """

    name: str
    patterns: tuple[str, ...]
    fix: str
    code: str = ""


ADAPTER = ForeignKind(
    "an adapter (LoRA), which is added to a model when it is loaded",
    ("adapter_config.json", "adapter_model.*"),
    "merge it into its model first, and convert the folder that this makes:",
    "from peft import AutoPeftModelForCausalLM as M; "
    'M.from_pretrained({folder}).merge_and_unload().save_pretrained("merged")',
)
# The first kind that matches is reported: the specific ones come before the general ones.
_WITHOUT_MODEL = (
    ForeignKind(
        "a diffusers pipeline",
        ("model_index.json",),
        "name the folder in it that holds the language model, such as {folder}/text_encoder",
    ),
    ForeignKind(
        "a sentence-transformers pipeline",
        ("modules.json",),
        "name the folder in it that holds the model; only causal language models are converted",
    ),
    ForeignKind(
        "GGUF weights",
        ("*.gguf", "*.ggml"),
        "fetch the original, or let transformers decode the file (what was quantised stays "
        "rounded) and convert the folder that this makes:",
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        'f, g = {folder}, {file}; M.from_pretrained(f, gguf_file=g).save_pretrained("full"); '
        'T.from_pretrained(f, gguf_file=g).save_pretrained("full")',
    ),
    ForeignKind(
        "a model in Mistral's own layout",
        ("consolidated.safetensors", "consolidated-*.safetensors"),
        "fetch the repository's config.json and model*.safetensors, or run transformers' "
        "models/mistral/convert_mistral_weights_to_hf.py on {folder}",
    ),
    ForeignKind(
        "a model in Meta's own layout",
        ("consolidated.*.pth", "params.json"),
        "fetch the repository's Hugging Face folder, or run transformers' "
        "models/llama/convert_llama_weights_to_hf.py on {folder}; "
        "compare n_kv_heads of params.json with the rows of wk.weight, which are right",
    ),
    ForeignKind(
        "shards without their index",
        ("model-*-of-*.safetensors",),
        "fetch model.safetensors.index.json, which says what belongs together, into {folder}",
    ),
    ForeignKind(
        "safetensors under another name",
        ("*.safetensors",),
        "if {file} is the whole model, rename it to model.safetensors",
    ),
    ForeignKind(
        "the state of a training run",
        ("zero_to_fp32.py", "global_step*", "*.distcp", "pytorch_model_fsdp*"),
        "let the trainer save the whole model: zero_to_fp32.py --safe_serialization for "
        "DeepSpeed, `accelerate merge-weights` for FSDP",
    ),
    ForeignKind(
        "pickled weights, which can run any code when they are loaded and are never loaded here",
        ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json"),
        "fetch safetensors, or run this in a sandbox without network or secrets, copy the "
        "tokenizer's files to what it makes, and convert that:",
        "from transformers import AutoModelForCausalLM as M; M.from_pretrained({folder}, "
        'dtype="auto", weights_only=True, trust_remote_code=False).save_pretrained("safe")',
    ),
    ForeignKind(
        "TensorFlow or Flax weights",
        ("*.h5", "*.msgpack", "*.ckpt.index", "saved_model.pb"),
        "fetch the safetensors of the same model, or save them with transformers 4, which still "
        "reads this format",
    ),
    ForeignKind(
        "an export, which has lost the names of the weights",
        ("*.onnx", "*.tflite", "*.mlpackage", "*.mlmodelc", "*.npz"),
        "convert the checkpoint that was exported, then export the result",
    ),
)


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter, even beside whole weights: transformers would add it.

    Raises:
        CheckpointError: there is one.
    """
    _refuse(folder, (ADAPTER,))


def refuse_without_model(folder: Path, wanted: str) -> None:
    """Refuse a folder that has no safetensors model, saying what it has instead.

    Args:
        folder: what was named.
        wanted: the files that it lacks.

    Raises:
        CheckpointError: always.
    """
    _refuse(folder, _WITHOUT_MODEL)
    raise CheckpointError(
        f"{folder} has no {wanted}",
        where=str(folder.absolute()),
        fix="name a Hugging Face checkpoint folder with config.json and safetensors files; "
        "of a Hub id nothing else is fetched",
    )


def _refuse(folder: Path, kinds: tuple[ForeignKind, ...]) -> None:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise not_listed(error, folder.absolute()) from error
    for kind in kinds:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in kind.patterns):
                fields = {"folder": str(folder), "file": name}
                literals = {field: json.dumps(value) for field, value in fields.items()}
                code = kind.code.format(**literals)
                command = f" python -c {shlex.quote(code)}" if code else ""
                raise CheckpointError(
                    f"{folder} holds {kind.name}",
                    where=str(folder / name),
                    fix=kind.fix.format(**fields) + command,
                )
