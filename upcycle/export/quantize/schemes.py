"""What `--quantize` may say: how the weights of each role and layer are stored."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from upcycle.errors import ExportError
from upcycle.options.base import NonNegative, Positive, Section
from upcycle.recipe.problems import problems_of
from upcycle.recipe.strict_yaml import read_tree

Kind = Literal["palette", "linear"]
Role = Literal["ffn", "attention", "lm_head", "embedding"]
_BITS = {"palette": (4, 6, 8), "linear": (4, 8)}


class Scheme(Section):
    """How a weight [out, in] is stored.

    Attributes:
        kind: "palette": indices into a table of 2^bits values, found by k-means; "linear": signed
            integers with one scale per output channel or block.
        bits: 4, 6 or 8 for a palette; 4 or 8 for linear.
        group: output channels that share a palette; all where absent.
        block: inputs that share a linear scale; all of a channel where absent. Blocks run on the
            GPU but not on the Neural Engine.
    """

    kind: Kind
    bits: Positive
    group: Positive | None = None
    block: Positive | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.bits not in _BITS[self.kind]:
            choices = " or ".join(map(str, _BITS[self.kind]))
            raise ValueError(f"{self.kind} has {choices} bits, not {self.bits}")
        foreign = "block" if self.kind == "palette" else "group"
        if getattr(self, foreign) is not None:
            raise ValueError(f"{self.kind} has no {foreign}")
        return self

    def __str__(self) -> str:
        size = self.group or self.block
        return f"{self.kind} {self.bits}-bit" + (f" by {size}" if size else "")


class LayerRule(Section):
    """Another scheme for some layers; null keeps fp16.

    Attributes:
        layers: their indices, from 0.
        ffn: for their feed-forward matrices; as for all layers where absent.
        attention: for their projections; as for all layers where absent.
    """

    layers: Annotated[tuple[NonNegative, ...], Field(strict=False, min_length=1)]
    ffn: Scheme | None = None
    attention: Scheme | None = None


class Promotion(Section):
    """More bits for the layers whose quantisation changes the model most.

    Attributes:
        count: how many layers, by measured KL divergence.
        to: their scheme, wherever they would have fewer bits.
    """

    count: Positive
    to: Scheme = Scheme(kind="linear", bits=8)


class Quantization(Section):
    """A whole scheme. What has none stays fp16, as norms, biases and routers always do.

    Attributes:
        ffn: feed-forward matrices, experts too.
        attention: projections.
        lm_head: the output matrix; where it is tied to the embedding, both.
        embedding: the input embedding, where it is not tied.
        overrides: for single layers; the last that names a layer counts.
        promote: layers that get more bits.
    """

    ffn: Scheme | None = None
    attention: Scheme | None = None
    lm_head: Scheme | None = None
    embedding: Scheme | None = None
    overrides: Annotated[tuple[LayerRule, ...], Field(strict=False)] = ()
    promote: Promotion | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        rules = (self, *self.overrides)
        fields = ("ffn", "attention", "lm_head", "embedding")
        if not any(getattr(rule, name, None) for rule in rules for name in fields):
            raise ValueError(f"nothing is quantised; give at least one of {', '.join(fields)}")
        return self

    def scheme(
        self, role: Role, layer: int | None, promoted: Collection[int] = ()
    ) -> Scheme | None:
        """How a weight is stored; None for fp16.

        Args:
            role: of the weight.
            layer: of the weight, None outside the layers.
            promoted: layers that `promote` was found to apply to.
        """
        scheme: Scheme | None = getattr(self, role)
        for rule in self.overrides:
            if layer in rule.layers and role in rule.model_fields_set:
                scheme = getattr(rule, role)
        if scheme and self.promote and layer in promoted and scheme.bits < self.promote.to.bits:
            return self.promote.to
        return scheme


def _everywhere(
    kind: Kind, bits: int, *, group: int | None = None, block: int | None = None
) -> Quantization:
    layers = Scheme(kind=kind, bits=bits, group=group, block=block)
    # Vocabularies have sizes that no group divides.
    vocabulary = Scheme(kind=kind, bits=bits, block=block)
    return Quantization(ffn=layers, attention=layers, lm_head=vocabulary, embedding=vocabulary)


def _mixed(count: int | None = None) -> Quantization:
    """4 bits for most of the weights, 6 for the logits, 8 for the small but sensitive attention.

    A palette for each channel costs 32 B of it, and on SmolLM2-135M takes the feed-forward
    matrices' divergence from 0.67 (16 channels each) to 0.25 nats per token.
    """
    return Quantization(
        ffn=Scheme(kind="palette", bits=4, group=1),
        attention=Scheme(kind="linear", bits=8),
        lm_head=Scheme(kind="palette", bits=6),
        embedding=Scheme(kind="palette", bits=4),
        promote=Promotion(count=count) if count else None,
    )


PRESETS = {
    "int8": _everywhere("linear", 8),
    "int4": _everywhere("linear", 4, block=32),
    "lut4": _everywhere("palette", 4, group=1),
    "lut6": _everywhere("palette", 6, group=16),
    "lut8": _everywhere("palette", 8, group=16),
    "mixed": _mixed(),
    "top8": _mixed(8),
    "top12": _mixed(12),
}


def load_quantization(spec: str) -> Quantization:
    """A preset by its name, or a YAML file.

    Raises:
        ExportError: there is no such preset or file, or the file is wrong; every problem is named
            with its line and key.
    """
    if spec in PRESETS:
        return PRESETS[spec]
    path = Path(spec)
    if not os.path.isfile(path):
        raise ExportError(
            f"there is no quantisation {spec!r}",
            where="--quantize",
            fix=f"choose one of {', '.join(PRESETS)}, or name a YAML file",
        )
    tree = read_tree(path)
    problems = list(tree.problems)
    if not problems:
        try:
            return Quantization.model_validate(tree.value)
        except ValidationError as error:
            problems = problems_of(error, Quantization, tree.where)
    raise ExportError(
        "; ".join(map(str, problems)), where=str(path), fix="mend each key named above"
    )
