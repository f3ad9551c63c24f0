"""Prove what is exact about a conversion."""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from upcycle.checkpoint.manifest import MANIFEST_NAME, read_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checks import Check
from upcycle.conversion import exactness as checks
from upcycle.conversion.retarget_check import check_retarget
from upcycle.errors import CheckpointError
from upcycle.families import shape_of
from upcycle.families.retargets.view import RetargetedCheckpoint, retargeted
from upcycle.heads.methods import get_method
from upcycle.planning import plan
from upcycle.progress import Progress, Watcher, ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# What the checks read of a manifest, and what it must be.
_FIELDS: dict[tuple[str, str], type | UnionType] = {
    ("source", "files"): dict,
    ("options", "dtype"): str | None,
    ("options", "method"): str,
    ("options", "seed"): int,
    ("options", "calibration"): list,
    ("result", "files"): dict,
}


@dataclass(frozen=True)
class Verification:
    """The checks that apply to a conversion."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check that applies failed."""
        return not any(check.failed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The checks as JSON-serialisable data."""
        rows = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {"passed": self.passed, "checks": rows}


def verify(source: str | Path, output: str | Path, *, watch: Watcher = ignore) -> Verification:
    """Check a converted folder against its source, one layer in memory at a time.

    Args:
        source: the checkpoint that was converted.
        output: the folder that `convert` made.
        watch: told the checks that are done.

    Raises:
        CheckpointError: one of the two is damaged, or the output is no conversion of the source.
    """
    after = Checkpoint.open(output)
    manifest = read_manifest(after.folder)
    if manifest is None or manifest["stage"] != "convert":
        raise CheckpointError(
            f"{after.folder} was not made by `upcycle convert`",
            where=str(after.folder / MANIFEST_NAME),
            fix="verify the folder that convert made; compare others with `upcycle eval`",
        )
    _check_fields(manifest, after.folder)
    options = manifest["options"]
    before = retargeted(Checkpoint.open(source), options["dtype"])
    todo = plan(
        before,
        kv_heads=shape_of(after.config).num_key_value_heads,
        method=options["method"],
        seed=options["seed"],
        drop_extra_attention=options.get("drop_extra_attention", False),  # absent in older folders
    )
    steps: list[Callable[[], list[Check]]] = [
        lambda: [checks.compare_files(before.folder, after.folder, manifest)],
        lambda: [checks.check_untouched(before, after, todo)],
        lambda: [checks.check_old_heads(before, after, todo)],
        lambda: [checks.check_finite(before, todo)],
        lambda: [checks.check_config(before, after, todo)],
        lambda: checks.check_permuted_heads(before, todo),
        lambda: checks.check_permuted_logits(before, todo),
    ]
    calibrated = bool(options["calibration"])
    if todo.extra or not calibrated:  # what text shaped is compared by the files' hashes alone
        steps.insert(2, lambda: [checks.check_merged(before, after, todo, calibrated=calibrated)])
    if isinstance(before, RetargetedCheckpoint):
        steps.append(lambda: check_retarget(before))
    now, wanted = todo.source_shape.num_key_value_heads, todo.num_key_value_heads
    if wanted < now and get_method(todo.method).lossless_on_equal_heads:
        steps.append(lambda: [checks.check_equal_heads(before, todo)])
    found: list[Check] = []
    for index, step in enumerate(steps):
        watch(Progress("verify", index, len(steps) + 1, "checks"))
        found += step()
    if not any(check.failed for check in found):  # a damaged folder may not even load
        found += checks.check_reload(after, todo)
    watch(Progress("verify", len(steps) + 1, len(steps) + 1, "checks"))
    return Verification(tuple(found))


def _check_fields(manifest: "Mapping[str, Any]", folder: Path) -> None:
    for (part, key), kind in _FIELDS.items():
        fields = manifest.get(part)
        # A key that is left out is no None.
        if not isinstance(fields, dict) or not isinstance(fields.get(key, ...), kind):
            raise CheckpointError(
                f"{MANIFEST_NAME} is damaged: {part}.{key} is not what convert writes",
                where=str(folder / MANIFEST_NAME),
                fix="convert the source again",
            )
