"""Student and teacher: that they fit each other and packed rows, and which weights move.

transformers separates packed documents by their positions only where it gets neither a mask nor a
cache; with either, attention silently leaks across them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.data.packing import PackedRows
from upcycle.errors import TrainingError
from upcycle.families import family_of
from upcycle.families.retargets.view import retargeted
from upcycle.models.meta_loading import model_without_data

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = (5, 11)  # tokens of the two documents that are packed to see whether they leak
_TOLERANCE = 1e-3


def check_vocabulary(
    student: "PreTrainedModel", teacher: "PreTrainedModel", rows: PackedRows
) -> None:
    """Every id has an embedding, and both models speak of the same tokens.

    Raises:
        TrainingError: an id is beyond the embedding, or the vocabularies differ in size.
    """
    sizes = [model.get_input_embeddings().num_embeddings for model in (student, teacher)]
    largest = int(rows.input_ids.max())
    if largest >= min(sizes) or student.config.vocab_size != teacher.config.vocab_size:
        raise TrainingError(
            f"token ids reach {largest}, the student embeds {sizes[0]}, the teacher {sizes[1]}",
            where="tokenizer and config.json, vocab_size",
            fix="train a checkpoint with the tokenizer and the source that it came from",
        )


@torch.no_grad()
def packing_leak(model: "PreTrainedModel") -> float:
    """How far a second document's logits move because of the first: relative to their spread."""
    first, second = (
        torch.arange(3, 3 + length, device=model.device)[None] % model.config.vocab_size
        for length in _LENGTHS
    )
    positions = torch.cat([torch.arange(length, device=model.device) for length in _LENGTHS])[None]
    packed = model(
        input_ids=torch.cat([first.flip(1), second], dim=1), position_ids=positions, use_cache=False
    ).logits[:, _LENGTHS[0] :]
    alone = model(input_ids=second, use_cache=False).logits
    return float((packed - alone).abs().max() / alone.float().std())


def check_isolation(model: "PreTrainedModel") -> None:
    """Refuse, before the first step, a model in which packed documents see each other.

    Raises:
        TrainingError: this model lets packed documents see each other, or computes no numbers.
    """
    leak = packing_leak(model)
    if math.isnan(leak):
        raise TrainingError(
            "its logits are not finite, or all the same",
            where=f"weights of {type(model).__name__}",
            fix="the checkpoint is damaged: fetch it or make it again",
        )
    if not leak <= _TOLERANCE:
        raise TrainingError(
            f"packed documents see each other: logits move by {leak:.1e} of their spread, "
            f"and {_TOLERANCE:.0e} is rounding",
            where=f"attention of {type(model).__name__}",
            fix="this model cannot be trained on packed rows; please report its class",
        )


def choose_trainable(
    model: nn.Module, config: Mapping[str, Any], which: str
) -> dict[str, nn.Parameter]:
    """Freeze all but the asked-for weights and return those by name, tied ones once.

    Args:
        model: the student.
        config: its raw `config.json`.
        which: "all", "attention" (every weight of the attention modules) or "kv" (the key and
            value projections with their biases and norms).

    Raises:
        FamilyError: the attention is not of a known family.
    """
    family = family_of(config)
    shape = family.shape(config)
    layers, prefixes = shape.attention_layers, [""]
    if which == "attention":
        prefixes = [f"{family.attention_module.format(layer=layer)}." for layer in layers]
    elif which == "kv":
        names = [family.tensor_names(layer, shape) for layer in layers]
        prefixes = [named[role] for named in names for role in family.kv_roles(shape)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(prefixes)))
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert chosen, f"nothing to train with {which!r}"
    return chosen


def check_trainable(source: Path, which: str) -> str:
    """Refuse trained weights that could not be written back, before anything is converted.

    Args:
        source: the folder of what will be converted.
        which: see `choose_trainable`.

    Raises:
        TrainingError: as `stored_names`.
    """
    checkpoint = retargeted(Checkpoint.open(source))
    model = model_without_data(checkpoint.config)
    stored = stored_names(model, choose_trainable(model, checkpoint.config, which), checkpoint)
    return f"{which}: {len(stored):,} tensors"


def stored_names(
    model: nn.Module, trainable: Mapping[str, nn.Parameter], checkpoint: Checkpoint
) -> dict[str, nn.Parameter]:
    """The checkpoint's tensor names for every trained weight; a tied weight may have two.

    Raises:
        TrainingError: a weight has no tensor of its name and shape, so that the result could not
            be written in the student's own layout.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in checkpoint.tensors:
            names.setdefault(id(parameter), []).append(name)
    stored: dict[str, nn.Parameter] = {}
    for name, parameter in trainable.items():
        own = names.get(id(parameter), [])
        fitting = [n for n in own if checkpoint.tensors[n].shape == tuple(parameter.shape)]
        if not own or fitting != own:
            fix = "load the source with transformers and save it again, then convert that"
            if _names_attention(checkpoint):
                fix = (
                    "set train.trainable to attention or kv: transformers has those weights as the "
                    "checkpoint has them, and renames or joins others, such as experts"
                )
            raise TrainingError(
                f"the model's weight {name} {tuple(parameter.shape)} has no tensor of that name "
                "and shape in the checkpoint",
                where=str(checkpoint.folder),
                fix=fix,
            )
        stored.update(dict.fromkeys(fitting, parameter))
    return stored


def _names_attention(checkpoint: Checkpoint) -> bool:
    """Whether the attention's tensors are named as transformers' class names them."""
    family = family_of(checkpoint.config)
    shape = family.shape(checkpoint.config)
    names = family.tensor_names(shape.attention_layers[0], shape).values()
    return checkpoint.tensors.keys() >= set(names)


def parameter_groups(
    trainable: Mapping[str, nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """AdamW groups: decay for matrices, none for norms and biases."""
    matrices = [parameter for parameter in trainable.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable.values() if parameter.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
