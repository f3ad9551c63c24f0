"""One small, declarative file per attention layout, looked up by `model_type`."""

from upcycle.families.family import Family
from upcycle.families.lookup import (
    FAMILIES,
    caches_latent,
    convertible,
    family_in,
    family_of,
    shape_of,
)
from upcycle.families.projections import Role

__all__ = [
    "FAMILIES",
    "Family",
    "Role",
    "caches_latent",
    "convertible",
    "family_in",
    "family_of",
    "shape_of",
]
