"""What a calibrated conversion notes of each layer in its manifest."""

from pydantic import TypeAdapter, ValidationError

from upcycle.checkpoint.manifest import Manifest, ManifestPart, Number


class Lost(ManifestPart):
    """Energy that no shared head can carry, as a fraction of all heads': `Residual`'s fields."""

    keys: Number
    values: Number


class Refined(ManifestPart):
    """The error of the attention's output before and after a fit: `Refinement`'s fields."""

    before: Number
    after: Number


class MeasuredLayer(ManifestPart):
    """What was done to a layer, and what it cost: `LayerReport`'s fields."""

    layer: int
    keys: str
    values: str
    residual: Lost
    refinement: Refined | None = None


_LAYERS = TypeAdapter(list[MeasuredLayer])


def measured_layers(manifest: Manifest) -> list[MeasuredLayer]:
    """The layers of a calibrated conversion; none where the manifest does not tell of them."""
    try:
        return _LAYERS.validate_python(manifest.result.document.get("layers"))
    except ValidationError:
        return []
