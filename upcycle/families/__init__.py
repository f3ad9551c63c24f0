"""One small, declarative file per attention layout, looked up by `model_type`."""

from upcycle.families.family import Family, Role
from upcycle.families.lookup import FAMILIES, family_of, shape_of

__all__ = ["FAMILIES", "Family", "Role", "family_of", "shape_of"]
