"""Whether a converted folder is what a recipe's `convert` section makes of its source."""

from upcycle.checkpoint.lineage import CONVERT, differences
from upcycle.checkpoint.manifest import Manifest
from upcycle.conversion.calibration_options import Calibration
from upcycle.options.convert import ConvertOptions


def option_changes(manifest: Manifest, section: ConvertOptions) -> list[str]:
    """What the section says otherwise than the options that a folder was made by.

    Options that a recipe has no key for are free.

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
    made = manifest.options.document
    known = {key: value for key, value in made.items() if key in asked}
    read = manifest.source.document.get("text")
    if read is not None and section.calibration:  # content tells more than names
        known["calibration"] = read
        asked["calibration"] = text.hashes()
    return differences(known, {key: value for key, value in asked.items() if key in made})


def is_conversion(manifest: Manifest) -> bool:
    """Whether a manifest is of a conversion."""
    return manifest.stage == CONVERT
