"""The torch model that an exported program is measured against."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import ExportError
from upcycle.export.quantize.weights import parameters_with_paths
from upcycle.models.loading import load_model
from upcycle.parity.exported import END, Exported

_WRAPPER = "model"  # the module that is exported holds the model under this name
_PART = re.compile(r"_parts_([0-9]+)(?=_)")  # where `SplitLinear` has its parts
_SHAKES = 3
_LAST_BIT = 2.0**-10  # of a number from 1 on in fp16
_DRAWN = 1 << 20  # random numbers for a weight; a larger one has them again and again
_LEAST_COSINE = 0.5  # of a compressed weight and its original; 3 bits give 0.97, another layer's 0


@dataclass(frozen=True)
class Logits:
    """A model's logits on the tokens of a check.

    Attributes:
        text: [N, vocabulary], all tokens from position 0 on.
        end: [16, vocabulary], the first tokens at the end of the context.
    """

    text: Tensor
    end: Tensor


@dataclass(frozen=True)
class Reference:
    """What a program must give.

    Attributes:
        full: logits of the checkpoint.
        own: logits with numbers that the program can hold: angles and weights in fp16, or the
            program's weights where they are compressed.
        shaken: the same where torch computes in fp16, and where every weight is a little off, by no
            more than fp16's last bit; none where the program does not round.
        replaced: parameters that were taken from the program.
    """

    full: Logits
    own: Logits
    shaken: tuple[Logits, ...]
    replaced: int


def load_reference(checkpoint: Checkpoint, program: Exported) -> Any:
    """The model of transformers, in fp32, that a program is measured against.

    Raises:
        CheckpointError: transformers cannot load it whole.
        ExportError: it has another vocabulary.
    """
    model = load_model(checkpoint.folder, dtype=torch.float32, attention="eager")
    rows = len(model.get_output_embeddings().weight)
    if rows != program.vocabulary:
        raise ExportError(
            f"{program.path.name} has logits for {program.vocabulary:,} tokens, and the model of "
            f"{checkpoint.folder.name} for {rows:,}",
            where=str(program.path),
            fix="compare with the checkpoint that it was made of",
        )
    return model


def reference_of(
    model: nn.Module, tokens: Tensor, end: int, weights: Mapping[str, Tensor], *, half: bool = True
) -> Reference:
    """The logits of a model of transformers in fp32, with a program's numbers, and rounded.

    Args:
        model: the checkpoint's; its numbers are replaced.
        tokens: [N].
        end: the position where the tokens at the end of the context begin.
        weights: the program's compressed weights, see `use_weights`.
        half: whether the program holds its numbers in fp16, and not those of the checkpoint.

    Raises:
        ExportError: a compressed weight of the program is not one of the model's.
    """
    full = logits_of(model, tokens, end)
    if not half:
        return Reference(full, full, (), 0)
    _round_to_half(model)
    replaced = use_weights(model, weights)
    own = logits_of(model, tokens, end)
    shaken = [logits_of(model.half(), tokens, end)]
    model.float()
    for seed in range(_SHAKES):
        # In both directions: what is nearly a tie is decided the other way in one of them.
        for size in (_LAST_BIT, -_LAST_BIT):
            _scale(model, seed, size, power=1)
            shaken.append(logits_of(model, tokens, end))
            _scale(model, seed, size, power=-1)
    return Reference(full, own, tuple(shaken), replaced)


def _scale(model: nn.Module, seed: int, size: float, *, power: int) -> None:
    """Multiply every weight in place by a power of 1 + size * (a number drawn from -1 to 1)."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        rows = parameter.data if parameter.ndim else parameter.data[None]
        count = min(len(rows), max(1, _DRAWN // rows[0].numel()))
        noise = torch.rand(count, *rows.shape[1:], generator=generator).mul_(2).sub_(1)
        factors = (1 + size * noise) ** power
        for some in torch.split(rows, count):
            some.mul_(factors[: len(some)])


@torch.inference_mode()
def logits_of(model: nn.Module, tokens: Tensor, end: int) -> Logits:
    """A model's logits on tokens [N], and on the first of them from the position `end` on."""

    def run(tokens: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + len(tokens))[None]
        output: Any = model(input_ids=tokens[None], position_ids=positions, use_cache=False)
        logits: Tensor = output.logits[0]
        return logits.float()

    return Logits(run(tokens, 0), run(tokens[:END], end))


def _round_to_half(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(
                lambda _module, _inputs, angles: tuple(part.half().to(part) for part in angles)
            )


def use_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> int:
    """Give a model the decompressed weights of a package, found by their names.

    Args:
        model: of transformers, in fp32.
        weights: as the program reads them, by the names of their constants, which are those of
            the parameters with "_" for "." and something about types behind.

    Returns:
        How many parameters were replaced, each name of a tied one counted.

    Raises:
        ExportError: a weight has no parameter of its name and shape, or does not resemble it.
    """
    places = [paths for _, paths in parameters_with_paths(model)]
    patterns = {name: _constant_name(name) for tied in places for name in tied}
    chosen = {}
    for constant, weight in _whole(weights).items():
        name = _parameter_of(constant, patterns)
        chosen[name] = _fitted(constant, weight, model.get_parameter(name).detach())
    replaced = 0
    for tied in places:
        own = {name: chosen[name] for name in tied if name in chosen}
        for name in tied if own else ():
            module, _, attribute = name.rpartition(".")
            # A tied parameter may have been stored once, or in two ways.
            value = own.get(name, next(iter(own.values())))
            setattr(model.get_submodule(module), attribute, nn.Parameter(value, False))
            replaced += 1
    return replaced


def _whole(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a split output head joined again, under the name that a whole one has."""
    parts: dict[str, dict[int, Tensor]] = {}
    for constant, weight in weights.items():
        part = _PART.search(constant)
        parts.setdefault(_PART.sub("", constant), {})[int(part[1]) if part else 0] = weight
    return {name: torch.cat([found[i] for i in sorted(found)]) for name, found in parts.items()}


def _constant_name(parameter: str) -> re.Pattern[str]:
    """What the export makes of a parameter's name, its module perhaps inside another one."""
    *modules, attribute = (_WRAPPER, *parameter.split("."))
    return re.compile(rf"{'_'.join(modules)}_([a-z]+_)?{attribute}(_|$)")


def _parameter_of(constant: str, patterns: Mapping[str, re.Pattern[str]]) -> str:
    found = [name for name, pattern in patterns.items() if pattern.match(constant)]
    if not found:
        raise ExportError(
            f"the compressed weight {constant!r} has no parameter of its name in the model",
            where="the package's constants",
            fix="compare with the checkpoint that the package was made of",
        )
    return max(found, key=len)


def _fitted(constant: str, weight: Tensor, parameter: Tensor) -> Tensor:
    """The weight in its parameter's shape; a 1×1 convolution has axes of size 1 behind."""
    if weight.numel() != parameter.numel() or weight.shape[: parameter.ndim] != parameter.shape:
        raise ExportError(
            f"the compressed weight {constant!r} has the shape {tuple(weight.shape)} and its "
            f"parameter {tuple(parameter.shape)}",
            where="the package's constants",
            fix="compare with the checkpoint that the package was made of",
        )
    value = weight.reshape(parameter.shape).float()
    cosine = torch.nn.functional.cosine_similarity(value.flatten(), parameter.flatten(), dim=0)
    if not float(cosine) > _LEAST_COSINE:
        raise ExportError(
            f"the compressed weight {constant!r} does not resemble its parameter: their cosine is "
            f"{float(cosine):.3f}",
            where="the package's constants",
            fix="compare with the checkpoint that the package was made of, or export it again",
        )
    # The export may have scaled it by a power of two against the overflow of fp16.
    ratio = float(value.norm() / parameter.norm())
    return value / 2.0 ** round(math.log2(ratio))
