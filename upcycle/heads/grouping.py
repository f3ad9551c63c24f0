"""Which KV heads share one: the balanced partition of least cost, realised by reordering heads."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

Group = tuple[int, ...]
Cost = Callable[[Sequence[int]], float]

_EXHAUSTIVE = 20_000  # partitions
_RESTARTS = 4


def search_groups(cost: Cost, kv_heads: int, groups: int, *, seed: int = 0) -> list[int]:
    """The order of KV heads whose contiguous groups cost least, for `permute_kv_heads`.

    Every partition is tried where there are few; otherwise swaps of two heads improve the
    contiguous groups, greedy ones and random ones until none does. The contiguous groups win ties.

    Args:
        cost: of one group (heads ascending); it is asked once for each. The costs of groups add up.
        kv_heads: K.
        groups: g, a divisor of K.
        seed: of the random starts.

    Returns:
        The K heads, groups one after another, each ascending and in the order of its first head.
    """
    size = kv_heads // groups
    known: dict[Group, float] = {}

    def cost_of(group: Sequence[int]) -> float:
        key = tuple(sorted(group))
        if key not in known:
            known[key] = cost(key)
        return known[key]

    def total(partition: Sequence[Group]) -> float:
        return sum(cost_of(group) for group in partition)

    everything = tuple(range(kv_heads))
    if _number_of_partitions(kv_heads, groups) <= _EXHAUSTIVE:
        best = min(_partitions(everything, size), key=total)
    else:
        starts = [everything, _greedy(cost_of, everything, size)]
        generator = random.Random(seed)
        starts += [tuple(generator.sample(everything, kv_heads)) for _ in range(_RESTARTS)]
        found = [
            _improve(cost_of, [start[i : i + size] for i in range(0, kv_heads, size)])
            for start in starts
        ]
        best = min(found, key=total)
    return [head for group in sorted(tuple(sorted(group)) for group in best) for head in group]


def _number_of_partitions(heads: int, groups: int) -> int:
    size = heads // groups
    ordered: int = math.factorial(heads) // math.factorial(size) ** groups
    return ordered // math.factorial(groups)


def _partitions(heads: Group, size: int) -> Iterator[list[Group]]:
    """Every way to part heads into groups of one size, contiguous first."""
    if not heads:
        yield []
        return
    first, others = heads[0], heads[1:]
    for rest in combinations(others, size - 1):
        left = tuple(head for head in others if head not in rest)
        for tail in _partitions(left, size):
            yield [(first, *rest), *tail]


def _greedy(cost: Cost, heads: Group, size: int) -> Group:
    """Groups grown one by one, each by the head that then costs least."""
    left, order = list(heads), []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            best = min(left, key=lambda head: cost([*group, head]))
            left.remove(best)
            group.append(best)
        order += group
    return tuple(order)


def _improve(cost: Cost, partition: Sequence[Group]) -> list[Group]:
    """Swap heads of two groups as long as that costs less."""
    groups = [tuple(group) for group in partition]
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            now = cost(groups[a]) + cost(groups[b])
            new_a, new_b = min(
                _swaps(groups[a], groups[b]), key=lambda pair: cost(pair[0]) + cost(pair[1])
            )
            if cost(new_a) + cost(new_b) < now:
                groups[a], groups[b] = new_a, new_b
                improved = True
    return groups


def _swaps(a: Group, b: Group) -> Iterator[tuple[Group, Group]]:
    for i, j in ((i, j) for i in range(len(a)) for j in range(len(b))):
        yield (*a[:i], b[j], *a[i + 1 :]), (*b[:j], a[i], *b[j + 1 :])
