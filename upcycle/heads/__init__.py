"""The maths on AttentionWeights: pure functions that know nothing of files and names."""

from upcycle.heads import lowrank as _registers_lowrank  # noqa: F401
from upcycle.heads import pool as _registers_pools  # noqa: F401
from upcycle.heads import procrustes as _registers_procrustes  # noqa: F401
