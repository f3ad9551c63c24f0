"""The small functions that target tensors are made with. Folding computes in fp64."""

from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING

from upcycle.families.retargets.rule import Made, Part, Settings

if TYPE_CHECKING:
    from torch import Tensor

    Pick = Callable[[Tensor], Tensor]


def moved(target: str, source: Part) -> Made:
    """A tensor that only changes its name."""
    return Made(target, source.shape, (source,), lambda tensor: tensor)


def norm(target: str, source: str, hidden_size: int) -> Iterator[Made]:
    """A LayerNorm that only changes its name."""
    for leaf in ("weight", "bias"):
        yield moved(f"{target}.{leaf}", Part(f"{source}.{leaf}", (hidden_size,)))


def identity_norm(target: str, like: Part) -> Iterator[Made]:
    """A LayerNorm with γ = 1 and β = 0, for one whose affine was folded away or never was.

    Args:
        target: its module.
        like: a source tensor with one row per channel.
    """
    size = like.shape[:1]
    yield Made(f"{target}.weight", size, (like,), lambda tensor: tensor.new_ones(size))
    yield zeros(f"{target}.bias", size, like)


def zeros(target: str, shape: tuple[int, ...], like: Part) -> Made:
    """A bias that the source does not have, with the dtype of a tensor that it has."""
    return Made(target, shape, (like,), lambda tensor: tensor.new_zeros(shape))


def linear(
    target: str,
    weight: Part,
    bias: Part | None,
    *,
    rows: int | None = None,
    pick: "Pick | None" = None,
    folded: tuple[Part, ...] | None = None,
) -> Iterator[Made]:
    """A Linear with a bias, which is zero where the source has none.

    A norm's affine folds into the Linear behind it: W (γ ⊙ x + β) + b = (W diag γ) x + (b + W β).

    Args:
        target: its module.
        weight: the source's weight, (out, in).
        bias: the source's bias, or None.
        rows: how many rows `pick` leaves.
        pick: selects or reorders the rows of weight and bias.
        folded: γ and β of the LayerNorm whose affine moves into this Linear.
    """
    take = pick or (lambda tensor: tensor)
    shape = (rows or weight.shape[0], weight.shape[1])
    new_weight, new_bias = f"{target}.weight", f"{target}.bias"
    biases = () if bias is None else (bias,)

    def fold_weight(matrix: "Tensor", gamma: "Tensor") -> "Tensor":
        return take(matrix).double() * gamma.double()

    def fold_bias(matrix: "Tensor", beta: "Tensor", *old: "Tensor") -> "Tensor":
        shift = take(matrix).double() @ beta.double()
        return shift + take(old[0]).double() if old else shift

    if folded:
        gamma, beta = folded
        yield Made(new_weight, shape, (weight, gamma), fold_weight, rounds=True)
        yield Made(new_bias, shape[:1], (weight, beta, *biases), fold_bias, rounds=True)
    else:
        yield Made(new_weight, shape, (weight,), take)
        if bias is None:
            yield zeros(new_bias, shape[:1], weight)
        else:
            yield Made(new_bias, shape[:1], (bias,), take)


def output_head(
    settings: Settings, present: Container[str], names: tuple[str, ...], hidden_size: int
) -> Iterator[Made]:
    """`lm_head.weight`, unless it is tied and not stored.

    A tied head that is stored goes along, so that transformers treats both alike: it ties what is
    equal and keeps apart what differs.

    Args:
        settings: of the source.
        present: the source's tensors.
        names: what the head is called there, the usual name first.
        hidden_size: D.
    """
    found = [name for name in names if name in present]
    if found or not settings["tie_word_embeddings"]:
        name = (found or [names[0]])[0]
        yield moved("lm_head.weight", Part(name, (settings.count("vocab_size"), hidden_size)))


def split_rows(tensor: "Tensor", *counts: int) -> "Tensor":
    """A tensor [rows, ...] as [*counts, rest, ...]: the first dimension as several."""
    return tensor.reshape(*counts, -1, *tensor.shape[1:])


def head_rows(part: int, heads: int) -> "Pick":
    """The q (0), k (1) or v (2) rows of a fused tensor with rows [h][q, k, v][d]."""
    return lambda fused: split_rows(fused, heads, 3)[:, part].flatten(0, 1)


def half_split_rows(heads: int, rotary_dim: int) -> "Pick":
    """Reorder each head's rotary rows from interleaved planes (2i, 2i + 1) to (i, i + r / 2)."""

    def reorder(tensor: "Tensor") -> "Tensor":
        by_head = split_rows(tensor, heads)
        head_dim = by_head.shape[1]
        rotary = range(rotary_dim)
        order = [*rotary[::2], *rotary[1::2], *range(rotary_dim, head_dim)]
        return by_head[:, order].flatten(0, 1)

    return reorder
