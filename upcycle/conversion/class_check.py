"""Whether transformers' class takes a source, told or refused before hours are spent on it."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.remote_code import AUTO_MAP, code_notice, model_code, remote_code_refusal
from upcycle.errors import CheckpointError, StrictError, warn
from upcycle.families import family_in
from upcycle.families.extra_attention import extra_attention
from upcycle.families.retargets.view import on_disk, retargeted
from upcycle.models.class_fit import ClassFit, Known, PendingFit, class_fit, class_fit_beside

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGE = 8 << 30  # bytes whose merging takes so long that the comparison comes before it
_FIX = (
    "fetch the checkpoint again, or save it with the class that it was trained with; config.json "
    "must describe these very weights"
)
_FIX_CODE = f"remove {AUTO_MAP} from config.json, as the output does"


@contextmanager
def class_checked(checkpoint: Checkpoint, *, strict: bool, slow: bool) -> "Iterator[ClassCheck]":
    """Compare a conversion's source with its class while the conversion goes on.

    Args:
        checkpoint: what is converted, as the class sees it.
        strict: warnings are refused, before anything is done.
        slow: whether the conversion runs the model, and so imports transformers itself.

    Raises:
        FamilyError: it does not fit, and has code of its own that says what its weights are.
        StrictError: there are warnings, and they are to be refused.
    """
    with class_fit_beside(checkpoint, _outside_decoder(checkpoint), here=slow) as pending:
        check = ClassCheck(on_disk(checkpoint), pending, strict=strict)
        if strict or slow or check.may_refuse or checkpoint.weight_bytes > _LARGE:
            check.finish()
        yield check


class ClassCheck:
    """The comparison of a conversion's source with its class, and what follows from it."""

    def __init__(self, source: Checkpoint, pending: PendingFit, *, strict: bool) -> None:
        """Take the source as it lies on disk, and a comparison that may still be under way."""
        self._source = source
        self._pending = pending
        self._strict = strict
        self._warnings: list[str] | None = None

    @property
    def may_refuse(self) -> bool:
        """Whether a misfit is an error: there is code that says what the weights are."""
        return bool(model_code(self._source.config))

    @property
    def fit(self) -> ClassFit:
        """The comparison, waited for."""
        return self._pending.result()

    def finish(self) -> list[str]:
        """Tell what does not fit, once, and return all warnings about the source.

        Raises:
            FamilyError: it does not fit, and has code of its own that says what its weights are.
            StrictError: there are warnings, and they are to be refused.
        """
        if self._warnings is None:
            source, found = self._source, self.fit.warnings
            if found and self.may_refuse:
                raise remote_code_refusal(source.config, source.folder, found[0])
            notice = code_notice(source.config)
            self._warnings = [*([notice] if notice else []), *found]
            if self._strict and self._warnings:
                raise StrictError(
                    "; ".join(self._warnings),
                    where=str(source.folder),
                    fix=f"{_FIX if found else _FIX_CODE}; without --strict it is converted with a "
                    "warning",
                )
            for text in found:
                warn(text)
        return self._warnings


def check_class(source: Path, *, strict: bool = False) -> str:
    """Compare a source with its class before a run; what was seen.

    Args:
        source: the folder of a checkpoint.
        strict: refuse also what loading ignores.

    Raises:
        CheckpointError: loading would refuse it, or fill weights with random numbers.
        StrictError: it has tensors that loading ignores, and those are to be refused.
    """
    checkpoint = retargeted(Checkpoint.open(source))
    fit = class_fit(checkpoint, _outside_decoder(checkpoint))
    if fit.warnings and (strict or not fit.loads):
        kind = CheckpointError if not fit.loads else StrictError
        raise kind("; ".join(fit.warnings), where=str(source), fix=_FIX)
    for text in fit.warnings:
        warn(text)
    return f"{len(checkpoint.tensors):,} tensors, as {fit.model_class} has them"


def _outside_decoder(checkpoint: Checkpoint) -> Known:
    """Tells tensors of blocks beside the decoder, which no class of a causal model loads."""
    family = family_in(checkpoint)
    blocks = extra_attention(checkpoint, family, family.shape(checkpoint.config))
    return lambda name: any(block.owns(name) for block in blocks)
