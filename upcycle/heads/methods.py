"""The table of merge methods: a new one is a row here and a function.

A third party adds one through the entry point `upcycle.methods`. Nothing here imports torch: the
command line tells what there is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from upcycle.errors import PlanError
from upcycle.registry import Registry

if TYPE_CHECKING:
    from upcycle.attention import AttentionWeights
    from upcycle.heads.moments import LayerMoments


@dataclass(frozen=True)
class MergeRequest:
    """What a method is asked for.

    Attributes:
        num_key_value_heads: g, a divisor of the weights' own K.
        layer: which layer the weights are.
        seed: for methods that draw.
        initializer_range: standard deviation of the source class's initial weights.
        moments: what calibration text says about the layer, or None without any.
    """

    num_key_value_heads: int
    layer: int
    seed: int
    initializer_range: float
    moments: "LayerMoments | None" = None


@dataclass(frozen=True)
class MergeSteps:
    """What a method does to a layer, in words; a norm, a clamp or a gate can forbid the better way.

    Attributes:
        keys: how keys are merged.
        values: how values are merged.
    """

    keys: str
    values: str


MergeFunction = Callable[["AttentionWeights", MergeRequest], "AttentionWeights"]
StepsFunction = Callable[["AttentionWeights"], MergeSteps]


@dataclass(frozen=True)
class Method:
    """A registered merge method: where it comes from, and what it promises.

    Attributes:
        name: what the user asks for.
        merge: the method.
        reference: its paper.
        does: for people, how a group becomes one head.
        lossless_on_equal_heads: whether the layer's function stays where the heads of each group
            are equal.
        is_baseline: whether it is there to be compared with, and costs much of a model's quality.
        needs_calibration: whether it is refused without moments.
        only_kv: whether it leaves q, o and their gate alone, so that nobody need read them.
        draws: whether its result depends on the seed, apart from text that is drawn by it.
        steps: what it does to given weights, or None where that is the same for all.
    """

    name: str
    merge: MergeFunction
    reference: str
    does: str = ""
    lossless_on_equal_heads: bool = True
    is_baseline: bool = False
    needs_calibration: bool = False
    only_kv: bool = False
    draws: bool = True
    steps: StepsFunction | None = None


METHODS: Registry[Method] = Registry("method", "upcycle.methods")


def method(
    name: str, *, reference: str, **contract: Any
) -> Callable[[MergeFunction], MergeFunction]:
    """Register a function `(weights, request) -> weights with g KV heads` as a method.

    Args:
        name: what the user asks for.
        reference: its paper.
        contract: other attributes of `Method`.
    """

    def register(function: MergeFunction) -> MergeFunction:
        METHODS.add(name)(Method(name, function, reference, **contract))
        return function

    return register


def get_method(name: str) -> Method:
    """Look a method up.

    Raises:
        PlanError: there is no such method.
    """
    found = METHODS.get(name)
    if found is None:
        raise PlanError(
            f"there is no method {name!r}",
            where="--method",
            fix=f"choose one of {', '.join(METHODS.names())}",
        )
    return found


def method_help() -> str:
    """For people: each method of this package, what it does and where it comes from."""
    return "; ".join(f"{each.name}: {each.does} ({each.reference})" for each in _OWN) + "."


def _later(function: str) -> Callable[..., Any]:
    """A function by "module:name", which is imported, with torch, when it is first called."""
    return lambda *arguments: resolve_name(function)(*arguments)


_AINSLIE = "Ainslie et al. 2023, arXiv 2305.13245, section 2.1"
_pool = partial(Method, reference=_AINSLIE, is_baseline=True, only_kv=True)
_OWN = (
    _pool("mean", _later("upcycle.heads.pool:mean"), does="the mean of the group", draws=False),
    _pool("first", _later("upcycle.heads.pool:first"), does="the first of the group", draws=False),
    _pool(
        "random",
        _later("upcycle.heads.pool:random"),
        does="drawn anew",
        lossless_on_equal_heads=False,
    ),
    Method(
        "procrustes",
        _later("upcycle.heads.procrustes:procrustes"),
        "Jin et al. 2025, arXiv 2412.20677, section 3",
        "the mean after rotations onto each other",
        draws=False,
        steps=_later("upcycle.heads.procrustes:procrustes_steps"),
    ),
    Method(
        "lowrank",
        _later("upcycle.heads.lowrank:lowrank"),
        "rank one per rotary plane and output-weighted PCA (Eckart and Young 1936)",
        "the least error of logits and outputs on calibration text",
        needs_calibration=True,
        steps=_later("upcycle.heads.lowrank:lowrank_steps"),
    ),
)
for _method in _OWN:
    METHODS.add(_method.name)(_method)
