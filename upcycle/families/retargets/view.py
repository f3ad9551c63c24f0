"""A checkpoint seen as one of another class: tensors are made when they are asked for."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from upcycle.checkpoint.headers import TORCH_DTYPES, Header, TensorInfo
from upcycle.checkpoint.naming import missing_tensor, unknown_tensor
from upcycle.checkpoint.quantised import refuse_quantised
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.remote_code import own_class
from upcycle.checkpoint.writer import tensor_chunks
from upcycle.errors import CheckpointError, PlanError
from upcycle.families.extra_attention import ExtraAttention
from upcycle.families.retargets.left_out import left_out
from upcycle.families.retargets.rule import Made, Part
from upcycle.families.retargets.rules import RETARGETS, target_config

if TYPE_CHECKING:
    from torch import Tensor

STORED_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
_CHUNK = 4 << 20


@dataclass(frozen=True)
class RetargetedCheckpoint(Checkpoint):
    """The target's configuration, and its tensors made from the source's one at a time.

    `headers` has the source's files, each with the tensors whose first source lies there, in the
    order of those; offsets count from zero, as these files are nowhere on disk.

    Attributes:
        original: the checkpoint as it lies on disk.
        made: how each tensor is made, with the source's names as they are in the files.
        left_out: blocks of the source beside its decoder, of which nothing is made.
    """

    original: Checkpoint
    made: Mapping[str, Made]
    left_out: tuple[ExtraAttention, ...]

    def read(self, name: str) -> "Tensor":
        """One tensor of the target, made now.

        Raises:
            CheckpointError: a finite number is too large for the dtype that was asked for.
        """
        import torch

        recipe, stored = self.made[name], TORCH_DTYPES[self.tensors[name].dtype]
        tensor = recipe.make(*(self.original.read(part.name) for part in recipe.sources))
        new = tensor.to(getattr(torch, stored)).contiguous()
        if new.dtype != tensor.dtype and not torch.equal(new.isfinite(), tensor.isfinite()):
            raise CheckpointError(
                f"{name} has numbers that {stored} cannot hold",
                where=f"{self.folder}, {', '.join(part.name for part in recipe.sources)}",
                fix="store the result as bfloat16 or float32 (--dtype)",
            )
        return new

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor as they will be stored, a few MiB at a time."""
        for block in tensor_chunks(self.read(name), self.tensors[name].dtype):
            for begin in range(0, len(block), _CHUNK):
                yield bytes(block[begin : begin + _CHUNK])


def on_disk(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint whose files are read: itself, or what a view is made from."""
    return checkpoint.original if isinstance(checkpoint, RetargetedCheckpoint) else checkpoint


def left_out_of(checkpoint: Checkpoint) -> tuple[ExtraAttention, ...]:
    """The blocks that a view has nothing of; a conversion must be asked to drop them."""
    return checkpoint.left_out if isinstance(checkpoint, RetargetedCheckpoint) else ()


def retargeted(checkpoint: Checkpoint, dtype: str | None = None) -> Checkpoint:
    """A checkpoint whose class cannot share KV heads, seen as the same model of one that can.

    Args:
        checkpoint: as opened.
        dtype: what to store, as torch names it. By default every tensor keeps its dtype where
            numbers only move; where some are computed (a folded norm), all are stored as float32.

    Returns:
        The view, or `checkpoint` itself where its own class can share KV heads.

    Raises:
        FamilyError: no class can express this model.
        CheckpointError: tensors are missing, unknown, quantised, or of another shape than the
            configuration says.
        PlanError: `dtype` is asked for and nothing is retargeted, or it is no float type.
    """
    rule = RETARGETS.get(str(checkpoint.config.get("model_type")))
    if dtype is not None and (rule is None or dtype not in STORED_DTYPES):
        raise PlanError(
            f"cannot store {checkpoint.config.get('model_type')} as {dtype}",
            where="--dtype",
            fix=f"one of {', '.join(STORED_DTYPES)}, for {', '.join(RETARGETS)}; other models keep "
            "the dtype of each tensor",
        )
    if rule is None:
        return checkpoint
    refuse_quantised(checkpoint)
    config = dict(target_config(checkpoint.config))
    present = _canonical_names(checkpoint, rule.base_prefix)
    with own_class(checkpoint.config, checkpoint.folder):
        recipes = [
            replace(made, sources=tuple(_found(checkpoint, part, present) for part in made.sources))
            for made in rule.tensors(rule.settings(checkpoint.config), present)
        ]
        beside = _left_out(checkpoint, recipes)
    new_dtype = STORED_DTYPES.get(str(dtype)) or _common_dtype(checkpoint, recipes)
    if new_dtype is not None:
        config["dtype"] = TORCH_DTYPES[new_dtype]
    headers = _headers(checkpoint, recipes, new_dtype)
    return RetargetedCheckpoint(
        folder=checkpoint.folder,
        config_text=json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        config=config,
        headers=headers,
        tensors={tensor.name: tensor for header in headers for tensor in header.tensors},
        original=checkpoint,
        made={made.name: made for made in recipes},
        left_out=beside,
    )


def _canonical_names(checkpoint: Checkpoint, prefix: str) -> dict[str, str]:
    """Names in the files by the name that a checkpoint with a head has for them."""
    whole = {name: name for name in checkpoint.tensors}
    return {**{prefix + name: name for name in whole}, **whole}


def _found(checkpoint: Checkpoint, part: Part, present: Mapping[str, str]) -> Part:
    """A part by its name in the files, after checking that it is what the rule expects."""
    name = present.get(part.name)
    if name is None:
        raise missing_tensor(
            checkpoint,
            part.name,
            fix="config.json must describe these very weights: compare its model_type, number of "
            f"layers and biases with the tensors{_other_head(checkpoint)}",
        )
    tensor = checkpoint.tensors[name]
    if tensor.shape != part.shape or tensor.dtype not in STORED_DTYPES.values():
        raise CheckpointError(
            f"config.json asks for floats of shape {list(part.shape)} but {name} is {tensor.dtype} "
            f"{list(tensor.shape)}",
            where=f"{checkpoint.folder / tensor.shard}, {name}",
            fix="set the sizes in config.json to what the weights are; quantised weights cannot be "
            "converted",
        )
    return part._replace(name=name)


def _left_out(checkpoint: Checkpoint, recipes: list[Made]) -> tuple[ExtraAttention, ...]:
    """The blocks beside the decoder; any other tensor that no rule reads would be lost.

    Raises:
        CheckpointError: there is one.
    """
    known = {part.name for made in recipes for part in made.sources}
    unknown = [
        name
        for name, tensor in checkpoint.tensors.items()
        if name not in known and not tensor.is_buffer
    ]
    beside = left_out(checkpoint, known, unknown)
    for name in unknown:
        if not any(block.owns(name) for block in beside):
            raise unknown_tensor(
                checkpoint,
                name,
                f"tensor {name} is not part of the model that config.json describes",
                fix="check the number of layers and the bias keys of config.json; extra heads have "
                f"no place in the class that the model becomes{_other_head(checkpoint)}",
            )
    return beside


def _other_head(checkpoint: Checkpoint) -> str:
    """What to say of a model that `architectures` gives another head, or none."""
    named = checkpoint.config.get("architectures") or []
    if any(str(name).endswith(("LMHeadModel", "ForCausalLM")) for name in named):
        return ""
    said = "".join(f"; architectures says {name}" for name in named[:1])
    return f"{said}; only causal language models can change their class"


def _common_dtype(checkpoint: Checkpoint, recipes: list[Made]) -> str | None:
    """What all tensors are stored as, or None where each keeps its own dtype."""
    if not any(made.rounds for made in recipes):
        return None
    wide = any(tensor.dtype == "F64" for tensor in checkpoint.tensors.values())
    return "F64" if wide else "F32"


def _headers(checkpoint: Checkpoint, recipes: list[Made], dtype: str | None) -> tuple[Header, ...]:
    """The source's files with the target's tensors; a file that gets none is left out."""
    by_first_source: dict[str, list[Made]] = {}
    for made in recipes:
        by_first_source.setdefault(made.sources[0].name, []).append(made)
    headers = []
    for header in checkpoint.headers:
        tensors: list[TensorInfo] = []
        position = 0
        for source in header.tensors:
            for made in by_first_source.get(source.name, []):
                stored = dtype or source.dtype
                tensor = TensorInfo(made.name, stored, made.shape, source.shard, position)
                tensors.append(tensor)
                position += tensor.nbytes
        if tensors:
            headers.append(replace(header, data_start=0, tensors=tuple(tensors)))
    return tuple(headers)
