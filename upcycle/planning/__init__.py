"""Every output tensor of a conversion as data, before any weight is read."""

from upcycle.planning.operations import Attention, Copy, Operation, PlannedShard
from upcycle.planning.planner import (
    Plan,
    PlannedSizes,
    check_kv_heads,
    plan,
    planned_family,
    planned_sizes,
)

__all__ = [
    "Attention",
    "Copy",
    "Operation",
    "Plan",
    "PlannedShard",
    "PlannedSizes",
    "check_kv_heads",
    "plan",
    "planned_family",
    "planned_sizes",
]
