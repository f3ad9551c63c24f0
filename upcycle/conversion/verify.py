"""Prove what is exact about a conversion."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from upcycle.checkpoint.lineage import CONVERT
from upcycle.checkpoint.manifest import MANIFEST_NAME, ManifestPart, read_manifest
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
    from collections.abc import Callable


class _Files(ManifestPart):
    files: dict[str, str]


class _Options(ManifestPart):
    dtype: str | None
    method: str
    seed: int
    calibration: list[str]
    drop_extra_attention: bool = False  # absent in older folders


class _Conversion(ManifestPart):
    """What the checks read of a manifest."""

    source: _Files
    options: _Options
    result: _Files


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
    if manifest is None or manifest.stage != CONVERT:
        raise CheckpointError(
            f"{after.folder} was not made by `upcycle convert`",
            where=str(after.folder / MANIFEST_NAME),
            fix="verify the folder that convert made; compare others with `upcycle eval`",
        )
    made = _conversion(manifest.document, after.folder)
    options = made.options
    before = retargeted(Checkpoint.open(source), options.dtype)
    todo = plan(
        before,
        kv_heads=shape_of(after.config).num_key_value_heads,
        method=options.method,
        seed=options.seed,
        drop_extra_attention=options.drop_extra_attention,
    )
    steps: list[Callable[[], list[Check]]] = [
        lambda: [
            checks.compare_files(before.folder, after.folder, made.source.files, made.result.files)
        ],
        lambda: [checks.check_untouched(before, after, todo)],
        lambda: [checks.check_old_heads(before, after, todo)],
        lambda: [checks.check_finite(before, todo)],
        lambda: [checks.check_config(before, after, todo)],
        lambda: checks.check_permuted_heads(before, todo),
        lambda: checks.check_permuted_logits(before, todo),
    ]
    calibrated = bool(options.calibration)
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


def _conversion(document: dict[str, Any], folder: Path) -> _Conversion:
    try:
        return _Conversion.model_validate(document)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"][:2]))
        raise CheckpointError(
            f"{MANIFEST_NAME} is damaged: {key} is not what convert writes",
            where=str(folder / MANIFEST_NAME),
            fix="convert the source again",
        ) from error
