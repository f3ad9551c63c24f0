"""The table of merge methods. A third party adds one through the entry point `upcycle.methods`."""

from collections.abc import Callable
from dataclasses import dataclass

from upcycle.attention import AttentionWeights
from upcycle.errors import PlanError
from upcycle.registry import Registry


@dataclass(frozen=True)
class MergeRequest:
    """What a method is asked for.

    Attributes:
        num_key_value_heads: g, a divisor of the weights' own K.
        layer: which layer the weights are.
        seed: for methods that draw.
        initializer_range: standard deviation of the source class's initial weights.
    """

    num_key_value_heads: int
    layer: int
    seed: int
    initializer_range: float


MergeFunction = Callable[[AttentionWeights, MergeRequest], AttentionWeights]


@dataclass(frozen=True)
class Method:
    """A registered merge method with where it comes from."""

    name: str
    merge: MergeFunction
    reference: str


METHODS: Registry[Method] = Registry("method", "upcycle.methods")


def method(name: str, *, reference: str) -> Callable[[MergeFunction], MergeFunction]:
    """Register a function `(weights, request) -> weights with g KV heads` as a method."""

    def register(function: MergeFunction) -> MergeFunction:
        METHODS.add(name)(Method(name, function, reference))
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
