"""The maths on AttentionWeights: pure functions that know nothing of files and names."""

from upcycle.heads import pool as _registers_its_methods  # noqa: F401
