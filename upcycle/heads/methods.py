"""The table of merge methods. A third party adds one through the entry point `upcycle.methods`."""

from collections.abc import Callable
from dataclasses import dataclass

from upcycle.attention import AttentionWeights
from upcycle.errors import PlanError
from upcycle.heads.moments import LayerMoments
from upcycle.registry import Registry


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
    moments: LayerMoments | None = None


@dataclass(frozen=True)
class MergeSteps:
    """What a method does to a layer, in words; a norm, a clamp or a gate can forbid the better way.

    Attributes:
        keys: how keys are merged.
        values: how values are merged.
    """

    keys: str
    values: str


MergeFunction = Callable[[AttentionWeights, MergeRequest], AttentionWeights]
StepsFunction = Callable[[AttentionWeights], MergeSteps]


@dataclass(frozen=True)
class Method:
    """A registered merge method with where it comes from.

    Attributes:
        name: what the user asks for.
        merge: the method.
        reference: its paper.
        needs_calibration: whether it is refused without moments.
        only_kv: whether it leaves q, o and their gate alone, so that nobody need read them.
        steps: what it does to given weights, or None where that is the same for all.
        draws: whether its result depends on the seed, apart from text that is drawn by it.
    """

    name: str
    merge: MergeFunction
    reference: str
    needs_calibration: bool = False
    steps: StepsFunction | None = None
    only_kv: bool = False
    draws: bool = True


METHODS: Registry[Method] = Registry("method", "upcycle.methods")


def method(
    name: str,
    *,
    reference: str,
    needs_calibration: bool = False,
    steps: StepsFunction | None = None,
    only_kv: bool = False,
    draws: bool = True,
) -> Callable[[MergeFunction], MergeFunction]:
    """Register a function `(weights, request) -> weights with g KV heads` as a method."""

    def register(function: MergeFunction) -> MergeFunction:
        made = Method(name, function, reference, needs_calibration, steps, only_kv, draws)
        METHODS.add(name)(made)
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
