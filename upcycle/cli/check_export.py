"""`upcycle check-export`: run a Core ML package here and compare it with its checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upcycle.cli.arguments import Source
from upcycle.cli.console import Console, Outcome, command
from upcycle.cli.findings import print_checks
from upcycle.program.values import LARGEST_FP16

if TYPE_CHECKING:
    from upcycle.parity.logits import LogitsDifference
    from upcycle.parity.results import Arithmetic, ExportCheck

_EPILOG = "Example: upcycle check-export out model.mlpackage --text prose.txt"


@command("check-export", epilog=_EPILOG)
def check_export_command(
    console: Console,
    source: Source,
    package: Annotated[
        Path, typer.Argument(metavar="OUT", help="What `upcycle export` made of SRC.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="Text: .txt, .jsonl, .parquet; the packaged text by default."),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens of prefill, and as many of decoding.")
    ] = 64,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", min=0.0, help="Fail above this mean KL to SRC, in nats."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", help="Another package of SRC, to compare with this one."),
    ] = None,
) -> Outcome:
    """Run the saved program on this machine, in fp32 and fp16, and compare its logits with SRC's.

    It shows what the program means, not what a device makes of it.
    """
    from upcycle.parity.check import check_export

    with console.progress() as watch:
        result = check_export(
            source,
            package,
            text=text or (),
            tokens=tokens,
            max_kl=max_kl,
            against=against,
            watch=watch,
        )
    kind = ", ".join(map(str, text)) if text else "the packaged held-out text"
    console.print(
        f"{result.tokens} tokens of {kind}: {result.prefilled} by prefill, "
        f"{result.tokens - result.prefilled} by decode"
    )
    if result.compressed:
        console.print(
            f"the package's weights are compressed: torch has {result.compressed} of them in place "
            "of the checkpoint's"
        )
    _print_differences(console, result)
    for found in result.arithmetics:
        if found.largest:
            _print_magnitudes(console, found)
    print_checks(console, result.checks)
    return Outcome(result.to_dict(), passed=result.passed)


def _print_differences(console: Console, result: "ExportCheck") -> None:
    rows = []
    for found in result.arithmetics:
        pairs = {
            "torch": found.text,
            "torch, end of context": found.end,
            "torch, checkpoint's numbers": found.full,
            "prefill, decoded": found.prefill,
            "other package": found.against,
        }
        rows += [_row(f"{found.name}: {what}", pair) for what, pair in pairs.items() if pair]
    console.print("torch computes in fp32, on weights and angles as the package can hold them")
    console.print("excused: positions where torch, rounded as the package is, is itself far off")
    header = ["against", "max |d|", "of range", "typical", "KL, nats", "same token", "decided"]
    console.table([*header, "excused"], rows)
    console.print()


def _row(name: str, difference: "LogitsDifference") -> list[str]:
    return [
        name,
        f"{difference.maximum:.3g}",
        f"{difference.relative:.2g}",
        f"{difference.typical_relative:.2g}",
        f"{difference.kl:.2g}",
        f"{difference.agreeing} / {difference.positions}",
        f"{difference.decided - difference.broken} / {difference.decided}",
        f"{difference.excused}",
    ]


def _print_magnitudes(console: Console, found: "Arithmetic") -> None:
    largest = ", ".join(
        f"{extreme.magnitude:,.0f} ({extreme.operation} {extreme.value})"
        for extreme in found.largest
    )
    console.print(f"{found.name}: largest |x| {largest}")
    console.print(
        f"{found.name}: {len(found.overflowed)} operations beyond fp16's {LARGEST_FP16:,}"
    )
    console.print()
