"""The forms of attention that an export can have: a new one is a row here and a function."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class AttentionForm:
    """How an exported program attends with the query heads of a group to their KV head.

    Attributes:
        name: what the user asks for, and what transformers calls it.
        does: for people, what it does with K and V.
        function: "module:name" of what transformers' `AttentionInterface` calls; imported, with
            torch, when a model is loaded.
        copies: how often a program copies each tensor of K or V that it attends to, where heads
            are grouped.
    """

    name: str
    does: str
    function: str
    copies: int


QFOLD = AttentionForm(
    "qfold", "never copies K and V", "upcycle.models.qfold:qfold_attention", copies=0
)
REPEAT_KV = AttentionForm(
    "repeat-kv",
    "copies them to all query heads, for comparison",
    "upcycle.models.qfold:repeated_attention",
    copies=1,
)
FORMS = {form.name: form for form in (QFOLD, REPEAT_KV)}
FORMS_HELP = "; ".join(f"{form.name} {form.does}" for form in FORMS.values()) + "."

if TYPE_CHECKING:
    FormName = str
else:
    FormName = Literal[tuple(FORMS)]
