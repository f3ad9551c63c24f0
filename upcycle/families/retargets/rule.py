"""What a retarget declares: the target's configuration, and how each target tensor is made.

A retarget maps every tensor of a class that cannot share KV heads onto a class that can, without
changing the function. It is declared as data and needs no weights: shapes, source names, and one
small function per tensor.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from upcycle.errors import FamilyError
from upcycle.families.class_config import class_defaults
from upcycle.families.retargets.targets import Target

if TYPE_CHECKING:
    from torch import Tensor


class Part(NamedTuple):
    """A tensor of the source, by name and the shape that the configuration asks for."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """One tensor of the target.

    Attributes:
        name: its name in the target class.
        shape: its shape there.
        sources: the source's tensors that it is made of.
        make: those tensors, in that order, to the new one.
        rounds: whether `make` computes rather than moves numbers, so that the result may need
            more digits than the source's dtype has.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Part, ...]
    make: "Callable[..., Tensor]"
    rounds: bool = False


@dataclass(frozen=True)
class Settings:
    """A raw `config.json` with the class defaults filled in."""

    model_type: str
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """The value of a key, or the class default; None where neither says one."""
        return self.values.get(key)

    def count(self, key: str) -> int:
        """A positive whole number.

        Raises:
            FamilyError: it is something else.
        """
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FamilyError(
                f"{key} is {value!r}, not a positive whole number",
                where=f"config.json, {key} (model_type {self.model_type})",
                fix="give the number that the model was made with",
            )
        return value

    def head_dim(self, hidden_size: str, num_attention_heads: str) -> int:
        """D = D / H, from the keys of D and H.

        Raises:
            FamilyError: H does not divide D.
        """
        hidden, heads = self.count(hidden_size), self.count(num_attention_heads)
        if hidden % heads:
            raise FamilyError(
                f"{heads} heads do not divide a hidden size of {hidden}",
                where=f"config.json, {hidden_size} and {num_attention_heads}",
                fix="give the numbers that the model was made with",
            )
        return hidden // heads

    def inner(self) -> int:
        """The MLP's width of a GPT-2-like configuration, whose `n_inner` may be null."""
        return 4 * self.count("n_embd") if self["n_inner"] is None else self.count("n_inner")

    def copied(self, *keys: str) -> dict[str, Any]:
        """Keys that mean the same in the target's configuration."""
        return {key: self[key] for key in (*_COMMON, *keys)}

    def refuse(self, key: str, why: str, fix: str) -> FamilyError:
        """The error for a setting that the target class cannot express."""
        return FamilyError(
            f"{self.model_type} with {key} {self[key]!r} has no class to become: {why}",
            where=f"config.json, {key}",
            fix=fix,
        )


# How the GPT-2 family's configurations may also spell their keys.
GPT_KEYS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_COMMON = (
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
    "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Retarget:
    """One source class.

    Attributes:
        model_type: the source's `model_type`.
        tokenizer_class: the tokenizer that transformers takes for the source where none is named.
        base_prefix: the path of the base model, which checkpoints of the bare model leave out.
        targets: the classes that models become.
        config: the target's configuration; raises FamilyError for what it cannot express.
        tensors: the target's tensors, given the canonical names that the checkpoint has.
        aliases: other spellings of the source's keys.
        defaults: what the source class assumes for keys that it reads without declaring them.
    """

    model_type: str
    tokenizer_class: str
    base_prefix: str
    targets: tuple[Target, ...]
    config: Callable[[Settings], dict[str, Any]]
    tensors: Callable[[Settings, Container[str]], Iterator[Made]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, config: Mapping[str, Any]) -> Settings:
        """A raw configuration with canonical keys and defaults."""
        values = dict(self.defaults)
        for stated in (class_defaults(self.model_type), config):
            values |= {self.aliases.get(key, key): value for key, value in stated.items()}
        return Settings(self.model_type, values)
