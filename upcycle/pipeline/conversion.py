"""Whether a converted folder is what a recipe's `convert` section makes of its source."""

from collections.abc import Mapping
from typing import Any

from upcycle.checkpoint.lineage import CONVERT, differences, mapping
from upcycle.conversion.calibration_options import Calibration
from upcycle.options.convert import ConvertOptions


def option_changes(manifest: Mapping[str, Any], section: ConvertOptions) -> list[str]:
    """What the section says otherwise than the options that a folder was made by.

    Options that a recipe has no key for are free, and so is a seed by which nothing is drawn.

    Args:
        manifest: of the converted folder.
        section: of the recipe.

    Raises:
        PlanError: the section asks for what cannot be done.
    """
    text = Calibration(
        section.calibration, section.calibration_tokens, section.refine, section.grouping
    )
    asked = {
        **section.model_dump(mode="json"),
        **text.options,
        "method": text.method(section.method),
    }
    if not text.uses_seed(asked["method"]):
        del asked["seed"]
    made = mapping(manifest.get("options"))
    known = {key: value for key, value in made.items() if key in asked}
    read = mapping(manifest.get("source")).get("text")
    if read is not None and section.calibration:  # content tells more than names
        known["calibration"] = read
        asked["calibration"] = text.hashes()
    return differences(known, {key: value for key, value in asked.items() if key in made})


def is_conversion(manifest: Mapping[str, Any] | None) -> bool:
    """Whether a manifest is of a conversion."""
    return (manifest or {}).get("stage") == CONVERT
