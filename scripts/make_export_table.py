"""Export a tiny model of every family, check each package, and write the table of docs/core-ml.md.

    python scripts/make_export_table.py            # about ten minutes on two cores

A family that does not export, that copies K or V, or whose package is not its model stops the
script.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from make_family_table import number
from marked import fill

from upcycle.export.coreml import export_coreml
from upcycle.models.loading import load_model
from upcycle.options.export import ExportOptions
from upcycle.parity.check import compare_program, program_reference
from upcycle.parity.exported import Program

ROOT = Path(__file__).resolve().parents[1]
PREFILL = 16
TOKENS = torch.arange(48) * 7919 % 251


def export_row(family: str, note: str, folder: Path) -> str:
    """Export one family, prove it, and say what was measured."""
    source = exported_checkpoint(folder / "source", family)
    exported = export_coreml(
        source, folder / "a.mlpackage", ExportOptions(context=CONTEXT, prefill=PREFILL)
    )
    program = Program.read(exported.package)
    model = load_model(source, dtype=torch.float32, attention="eager")
    result = compare_program(program_reference(model, program, TOKENS), program, TOKENS)
    tiles = sum(tile.of_kv for graph in exported.functions.values() for tile in graph.tiles)
    failed = [check.name for check in result.checks if not check.passed]
    if failed or tiles:
        sys.exit(f"{family}: {tiles} tiles of K and V; failed: {', '.join(failed)}")
    operations = " / ".join(str(each.histogram.total()) for each in exported.functions.values())
    differences = " / ".join(number(found.text.relative) for found in result.arithmetics)
    agreeing = " / ".join(str(found.text.agreeing) for found in result.arithmetics)
    return f"| `{family}` | {note} | {operations} | {tiles} | {differences} | {agreeing} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    columns = (
        "family",
        "among it",
        f"operations, decode / prefill of {PREFILL}",
        "tiles of K and V",
        "largest logit difference, of range, fp32 / fp16",
        f"same token, of {len(TOKENS)}",
    )
    rows = [f"| {' | '.join(columns)} |", "|---|---|--:|--:|--:|--:|"]
    for family, (note, _) in EXPORTED.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(export_row(family, note, Path(folder)))
        print(rows[-1], flush=True)
    fill("export-families", "\n".join(rows))


sys.path.insert(0, str(ROOT))
from tests.export.families import CONTEXT, EXPORTED, exported_checkpoint  # noqa: E402

if __name__ == "__main__":
    main()
