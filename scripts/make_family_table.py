"""Run the tests of the families and write what they measured into docs/models.md.

    python scripts/make_family_table.py            # about three minutes on two cores

Every row comes from a family's declaration, and its numbers from the tests that passed; a failing
test stops the script.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

from marked import fill

from upcycle.families import FAMILIES, Family, convertible
from upcycle.families.projections import Fused
from upcycle.families.refused import REFUSALS
from upcycle.families.retargets.rules import RETARGETS

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/families", "tests/conversion/test_convert.py")
Measured = dict[str, dict[str, float]]


def run_tests() -> Measured:
    """What the tests recorded, by property and then by the test's parameter."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *TESTS]
        subprocess.run(command, cwd=ROOT, check=True)
        measured: Measured = defaultdict(dict)
        for case in ElementTree.parse(report).iter("testcase"):
            parameter = str(case.get("name")).partition("[")[2].rstrip("]")
            for entry in case.iter("property"):
                measured[str(entry.get("name"))][parameter] = float(str(entry.get("value")))
    return measured


def layout(family: Family) -> str:
    """How q, k and v lie, in words."""
    if not isinstance(family.projections, Fused):
        extras = [name for name in ("gate", "sinks") if getattr(family, name)]
        if getattr(family.projections, "gated", False):
            extras.append("gate in q")
        return ", ".join(["q, k, v", *extras])
    return "rows [h][q, k, v] or q, k, v" if family.projections.per_head else "rows q, k, v"


def norm(family: Family) -> str:
    """The norm of queries and keys, in words."""
    if family.qk_norm is None:
        return "none"
    spans = {"shared": "per head, shared", "head": "per head, own", "all": "over all heads"}
    declared = family.qk_norm.norm
    words = [{"rms": "RMS", "layer": "LayerNorm"}[declared.kind], spans[declared.span]]
    if family.qk_norm.query is None:
        words[1] = "no weight"
    if declared.after_rope:
        words.append("after RoPE")
    return ", ".join(words) + (" (optional)" if family.qk_norm.when else "")


def biases(family: Family) -> str:
    """Which projections have biases, in words."""

    def word(flag: bool | str) -> str:
        return "optional" if isinstance(flag, str) else "yes" if flag else "no"

    both = word(family.qkv_bias), word(family.output_bias)
    return "none" if both == ("no", "no") else " / ".join(both)


def rope(family: Family) -> str:
    """The rotation, in words."""
    if family.rope_pairing == "none":
        return "none"
    partial = family.setting({}, "partial_rotary_factor") is not None
    return family.rope_pairing + (", partial" if partial else "")


def number(value: float) -> str:
    """A difference to one digit; 0 where not one bit differs."""
    return f"{value:.0e}" if value else "0"


def family_table(measured: Measured) -> str:
    """Model types that load as themselves."""
    rows = [
        "| model_type | layout | q/k norm | biases qkv / o | RoPE | merged | reordered |",
        "|---|---|---|---|---|--:|--:|",
    ]
    for name in convertible():
        family = FAMILIES.get(name)
        assert family is not None
        only = " (H or 1)" if family.multi_query_key else ""
        hybrid = " (some layers)" if family.attention_layers else ""
        numbers = " | ".join(number(measured[kind][name]) for kind in ("merged", "permuted"))
        rows.append(
            f"| `{name}`{only}{hybrid} | {layout(family)} | {norm(family)} | {biases(family)} "
            f"| {rope(family)} | {numbers} |"
        )
    return "\n".join(rows)


def retarget_table(measured: Measured) -> str:
    """Model types that become another one first."""
    rows = ["| source | loads as | logits before merging, fp64 |", "|---|---|--:|"]
    rows += [
        f"| {name} | `{target}` | {number(measured['retargeted'][name])} |"
        for name, target in sorted(retargets().items())
        if name in measured["retargeted"]
    ]
    return "\n".join(rows)


def engine_table() -> str:
    """What other engines make of the classes that models become."""
    engines = {
        made.model_type: made.engines for rule in RETARGETS.values() for made in rule.targets
    }
    rows = [f"| `{name}` | {text} |" for name, text in sorted(engines.items())]
    return "\n".join(["| class | other engines |", "|---|---|", *rows])


def retargets() -> dict[str, str]:
    """The tested sources with the class that each becomes."""
    sys.path.insert(0, str(ROOT))
    from tests.families.retarget_sources import SOURCES

    return {name: target for name, (_, _, target) in SOURCES.items()}


def refusal_table() -> str:
    """Kinds of model that are refused."""
    rows = ["| kind | why |", "|---|---|"]
    rows += [f"| {refused.kind} | {refused.reason} |" for refused in REFUSALS]
    return "\n".join(rows)


def counts() -> str:
    """How many model types there are of each kind."""
    return (
        f"{len(convertible())} model types load as themselves, {len(RETARGETS)} become "
        f"another class first, {len(REFUSALS)} kinds are refused with the reason."
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    measured = run_tests()
    for name, text in {
        "family-counts": counts(),
        "families": family_table(measured),
        "retargets": retarget_table(measured),
        "retarget-engines": engine_table(),
        "refusals": refusal_table(),
    }.items():
        fill(name, text)
    print(counts())


if __name__ == "__main__":
    main()
