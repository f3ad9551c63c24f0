"""What a decoder takes and gives: the interface of an exported function.

The names of tokens, mask, logits and states are those of swift-transformers, whose stateful class
wants another program all the same: see `several-masks` among the lints, and docs/core-ml.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

INPUT_IDS = "inputIds"
POSITION = "position"
CAUSAL_MASK = "causalMask"
SLIDING_MASK = "slidingMask"
LOGITS = "logits"
HIDDEN = "hidden"  # what a chunk of a model gets from the one before
NEW_HIDDEN = "newHidden"  # and gives to the next
NEXT_TOKEN = "nextToken"
KEY_CACHE = "keyCache"
VALUE_CACHE = "valueCache"
MASKED = -4e4  # finite in fp16: a row of -inf would make NaN

# Functions of a package.
DECODE = "main"
PREFILL = "prefill"


class Input(NamedTuple):
    """An input of a function."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["int32", "float16"]


@dataclass(frozen=True)
class Signature:
    """What a decoder takes and gives for a number of queries.

    Attributes:
        inputs: in the order of the arguments of `forward`.
        outputs: names, in the order in which `forward` returns them; all are fp16 but the next
            tokens, which are int32.
        states: shapes by name; the names are those of the decoder's buffers. They are fp16 in the
            program although the traced buffers are fp32.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Decoder(Protocol):
    """A module that can be traced and converted, for any number of queries T per call."""

    def signature(self, queries: int) -> Signature:
        """What `forward` takes and gives for T queries."""

    def example_inputs(self, queries: int) -> "tuple[Tensor, ...]":
        """Arguments of `forward` as `signature` says, masks and all (fp16 ones in fp32)."""
