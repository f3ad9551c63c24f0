"""How far each number of KV heads moves a model's outputs, as `upcycle sweep` measures it."""

from dataclasses import dataclass

from upcycle.evaluation.results import Text
from upcycle.kvcache.counting import AttentionCounts


@dataclass(frozen=True)
class Difference:
    """How far one kind of output moved over all tokens of the text.

    Attributes:
        identical: whether not one bit differs.
        max_absolute: the largest difference.
        max_relative: the same relative to the source's largest magnitude.
        rms_relative: the root mean square of the difference relative to that of the source.
    """

    identical: bool
    max_absolute: float
    max_relative: float
    rms_relative: float


@dataclass(frozen=True)
class Drift:
    """The model with one number of KV heads.

    Attributes:
        counts: what its attention costs, at the length of the windows.
        weight_bytes: of all weights that the conversion wrote.
        logits: how far the logits moved.
        layers: the same of the hidden state after each layer; the last is after the final norm.
    """

    counts: AttentionCounts
    weight_bytes: int
    logits: Difference
    layers: tuple[Difference, ...]


@dataclass(frozen=True)
class DriftSweep:
    """Every number of KV heads that was asked for.

    Attributes:
        num_key_value_heads: of the source.
        attention_layers: layers with attention.
        head_dim: channels of a key head.
        value_head_dim: channels of a value head.
        nothing_to_merge: why there are no fewer KV heads to have, if so.
        method: how groups became one head.
        device: where the models ran.
        dtype: of weights and arithmetic.
        text: what they read.
        choices: most heads first.
    """

    num_key_value_heads: int
    attention_layers: int
    head_dim: int
    value_head_dim: int
    nothing_to_merge: str | None
    method: str
    device: str
    dtype: str
    text: Text
    choices: tuple[Drift, ...]
