"""`upcycle predict`: what each number of KV heads would cost, before converting."""

from typing import TYPE_CHECKING

from upcycle.cli.arguments import Calibration, CalibrationTokens, Device, Seed, Source
from upcycle.cli.console import Console, Outcome, command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from upcycle.heads.residuals import Residual


@command("predict", epilog="Example: upcycle predict recipes/demo-source --calibration builtin")
def predict_command(
    console: Console,
    source: Source,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = 16384,
    seed: Seed = 0,
    device: Device = "auto",
) -> Outcome:
    """Show how much of each layer's keys and values no smaller number of KV heads can carry.

    Reads the weights, one layer at a time.
    """
    from upcycle.conversion.predict import predict
    from upcycle.options.base import BUILTIN

    texts = calibration or [BUILTIN]
    with console.progress() as watch:
        prediction = predict(
            source,
            calibration=texts,
            tokens=calibration_tokens,
            seed=seed,
            device=device,
            watch=watch,
        )
    outcome = Outcome({"source": source, **prediction.to_dict()})
    if not prediction.kv_heads:
        console.print(f"{source}: already multi-query: nothing to merge")
        return outcome
    header = ["layer", *(f"{g} KV heads: K / V" for g in prediction.kv_heads)]

    rows = [[str(entry.layer), *_cells(entry.residuals)] for entry in prediction.layers]
    means = _cells({g: prediction.mean(g) for g in prediction.kv_heads})
    console.print(
        f"{source}: energy of keys and values that is lost, on {prediction.tokens:,} tokens of "
        f"{', '.join(map(str, texts))}"
    )
    console.table(header, [*rows, ["mean", *means]])
    console.print(
        "lower is better; values are usually what costs. `upcycle convert --calibration` keeps "
        "what can be kept, and --refine N heals most of the rest"
    )
    return outcome


def _cells(residuals: "Mapping[int, Residual]") -> list[str]:
    return [f"{residual.keys:.1%} / {residual.values:.1%}" for residual in residuals.values()]
