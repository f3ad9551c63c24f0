"""`upcycle check-export`: run a Core ML package here and compare it with its checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upcycle.cli.arguments import Source
from upcycle.cli.console import Console, Outcome, command

if TYPE_CHECKING:
    from upcycle.export.parity.logits import Difference
    from upcycle.export.parity.results import Arithmetic, ExportCheck

_EPILOG = "Example: upcycle check-export out model.mlpackage --text prose.txt"


@command("check-export", epilog=_EPILOG)
def check_export_command(
    console: Console,
    source: Source,
    package: Annotated[
        Path, typer.Argument(metavar="OUT.mlpackage", help="What `upcycle export` made of SRC.")
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
    from upcycle.export.parity.check import check_export

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
            f"the package's weights are compressed: the reference is {source} with "
            f"{result.compressed} weights of the package"
        )
    _print_differences(console, result)
    for found in result.arithmetics:
        if found.largest:
            _print_magnitudes(console, found)
    console.table(
        ["check", "measured", "limit", ""],
        [
            [
                check.name,
                f"{check.measured:.3g}",
                f"{check.limit:.3g}",
                "ok" if check.passed else "FAILED",
            ]
            for check in result.checks
        ],
    )
    for check in result.checks:
        if not check.passed:
            console.print(f"failed: {check.name}: {check.detail}")
    return Outcome(result.to_dict(), passed=result.passed)


def _print_differences(console: Console, result: "ExportCheck") -> None:
    rows = []
    for found in result.arithmetics:
        pairs = {
            "torch": found.text,
            "torch, end of context": found.end,
            "torch, full weights": found.full,
            "prefill, decoded": found.prefill,
            "other package": found.against,
        }
        rows += [_row(f"{found.name}: {what}", pair) for what, pair in pairs.items() if pair]
    header = ["against", "max |d|", "mean |d|", "of range", "KL, nats", "same token", "decided"]
    console.table(header, rows)
    console.print()


def _row(name: str, difference: "Difference") -> list[str]:
    return [
        name,
        f"{difference.maximum:.3g}",
        f"{difference.mean:.3g}",
        f"{difference.relative:.2g}",
        f"{difference.kl:.2g}",
        f"{difference.agreeing} / {difference.positions}",
        f"{difference.decided - difference.broken} / {difference.decided}",
    ]


def _print_magnitudes(console: Console, found: "Arithmetic") -> None:
    largest = ", ".join(
        f"{extreme.magnitude:,.0f} ({extreme.operation} {extreme.value})"
        for extreme in found.largest
    )
    console.print(f"{found.name}: largest |x| {largest}")
    console.print(f"{found.name}: {len(found.overflowed)} operations beyond fp16's 65,504")
    console.print()
