"""What the options of all stages share."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

BUILTIN = "builtin"  # as calibration text: the text that comes with the package
# Strict scalars (no "5" for 5, no True for 1) inside sequences and paths that YAML can write.
PathValue = Annotated[Path, Field(strict=False)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
