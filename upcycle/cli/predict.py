"""`upcycle predict`: what each number of KV heads would cost, before converting."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from upcycle.cli.arguments import Source
from upcycle.cli.console import Console, Outcome, command
from upcycle.cli.flags import Only
from upcycle.options.base import BUILTIN
from upcycle.options.convert import MergeOptions

if TYPE_CHECKING:
    from upcycle.heads.residuals import Residual


@command("predict", epilog="Example: upcycle predict recipes/demo-source --calibration builtin")
def predict_command(
    console: Console,
    source: Source,
    options: Annotated[
        MergeOptions,
        Only(
            (
                "calibration",
                "calibration_weights",
                "calibration_tokens",
                "calibration_window",
                "seed",
                "device",
            )
        ),
    ] = MergeOptions(calibration=(Path(BUILTIN),), calibration_tokens=16_384),
) -> Outcome:
    """Show how much of each layer's keys and values no smaller number of KV heads can carry.

    Reads the weights, one layer at a time.
    """
    from upcycle.conversion.predict import predict

    with console.progress() as watch:
        prediction = predict(source, options, watch=watch)
    outcome = Outcome({"source": source, **prediction.to_dict()})
    if not prediction.kv_heads:
        console.print(f"{source}: already multi-query: nothing to merge")
        return outcome
    header = ["layer", *(f"{g} KV heads: K / V" for g in prediction.kv_heads)]

    rows = [[str(entry.layer), *_cells(entry.residuals)] for entry in prediction.layers]
    means = _cells({g: prediction.mean(g) for g in prediction.kv_heads})
    console.print(
        f"{source}: energy of keys and values that is lost, on {prediction.tokens:,} tokens of "
        f"{', '.join(map(str, options.calibration))}"
    )
    console.table(header, [*rows, ["mean", *means]])
    console.print(
        "lower is better; values are usually what costs. `upcycle convert --calibration` keeps "
        "what can be kept, and --refine N heals most of the rest"
    )
    return outcome


def _cells(residuals: Mapping[int, "Residual"]) -> list[str]:
    return [f"{residual.keys:.1%} / {residual.values:.1%}" for residual in residuals.values()]
