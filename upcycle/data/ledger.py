"""What reading kept, dropped and refused, with file and line."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from upcycle.errors import DataError
from upcycle.options.base import MAX_BAD_SHARE

TRAIN_DATA, EVALUATE = "train.data", "evaluate"  # the sections of a recipe that name text
TEXT_KEY = f"{TRAIN_DATA}.text_column"
# A few bad rows of a small file are no sign of a wrong file, however large their share.
_FEW_ROWS, _FEW_SHARE = 3, 0.1
# A file that shows nothing else for so long is not read to its end.
_HOPELESS_ROWS, _HOPELESS_SHARE = 1000, 0.9
_EXAMPLES = 5


@dataclass(frozen=True)
class Document:
    """One piece of text; either `text` or `messages` is given.

    Attributes:
        source: where it came from, as file or file:row.
        text: plain text.
        messages: a chat, each message with "role" and "content".
        arguments: what the row has for the chat template beside its messages, such as "tools".
    """

    source: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Ledger:
    """Counts of what a reader saw.

    Attributes:
        name: the file.
        max_bad_share: the share of rows that may be bad. A few bad rows of a small file pass too,
            at most 3 and at most a tenth of it; 0 lets none pass.
        section: of a recipe, which has keys for this share and for the column of text; None where
            no recipe is read.
        kept: documents handed on.
        dropped: rows without text (empty, null, no such key), by reason: nothing is lost.
        bad: rows that cannot be used, by reason.
        unused: documents of whose rows something was left out, by what.
        repaired: rows with lone surrogates, which became U+FFFD.
        examples: the first few bad rows, as file:line and reason.
        fix: what would mend the first of them; None where its reason says it all.
    """

    name: str = ""
    max_bad_share: float = MAX_BAD_SHARE
    section: str | None = None
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)
    fix: str | None = None

    def refuse(self, where: str, reason: str, fix: str | None = None) -> None:
        """Count a row that cannot be used.

        Raises:
            DataError: there was next to nothing else for a thousand rows.
        """
        if not self.examples:
            self.fix = fix
        self.bad[reason.partition(":")[0]] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append((where, reason))
        hopeless = max(_HOPELESS_SHARE, self.max_bad_share) * self._num_rows
        if self._num_bad >= _HOPELESS_ROWS and self._num_bad > hopeless:
            raise self._too_many()

    def reject(self, document: Document, reason: str, fix: str | None = None) -> None:
        """Count a document that was handed on already, and turned out to be of no use.

        Raises:
            DataError: as for `refuse`.
        """
        self.kept -= 1
        self.refuse(document.source, reason, fix)

    def check(self) -> None:
        """Judge one file's ledger.

        Raises:
            DataError: too many bad rows, or no document at all.
        """
        few = min(_FEW_ROWS, _FEW_SHARE * self._num_rows) if self.max_bad_share else 0
        if self._num_bad > max(few, self.max_bad_share * self._num_rows):
            raise self._too_many()
        if not self.kept:
            if self.bad:
                raise self._too_many()
            reasons = ", ".join(f"{count} {why}" for why, count in self.dropped.items())
            named = (
                f", or name it with {TEXT_KEY}" if TEXT_KEY.startswith(f"{self.section}.") else ""
            )
            raise DataError(
                f"no row of {self.name} has text ({reasons or 'there are no rows'})",
                where=self.name,
                fix=f"call that column 'text'{named}; chats are 'messages', 'conversations', or "
                "'prompt' and 'completion'",
            )

    def add(self, other: "Ledger") -> None:
        """Add another file's counts."""
        self.kept += other.kept
        self.dropped += other.dropped
        self.bad += other.bad
        self.unused += other.unused
        self.repaired += other.repaired
        self.examples += other.examples
        self.fix = self.fix or other.fix

    @property
    def has_losses(self) -> bool:
        """Whether any row was dropped, refused or changed, or not used whole."""
        return bool(self.dropped or self.bad or self.unused or self.repaired)

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{self.kept} documents"]
        parts += [f"{count} dropped ({why})" for why, count in self.dropped.items()]
        parts += [f"{count} bad ({why})" for why, count in self.bad.items()]
        if self.examples:
            where, reason = self.examples[0]
            parts[-1] += f", the first at {where}: {reason}"
        parts += [f"{count} with {what}" for what, count in self.unused.items()]
        if self.repaired:
            parts.append(f"{self.repaired} with lone surrogates repaired")
        return ", ".join(parts)

    @property
    def _num_bad(self) -> int:
        return self.bad.total()

    @property
    def _num_rows(self) -> int:
        return self.kept + self._num_bad + self.dropped.total()

    def _too_many(self) -> DataError:
        key = "" if self.section is None else f" ({self.section}.max_bad_share in a recipe)"
        return DataError(
            f"{self._num_bad} of {self._num_rows} rows of {self.name} cannot be read: "
            + "; ".join(f"{where}: {reason}" for where, reason in self.examples),
            where=self.examples[0][0],
            fix=f"{self.fix or 'mend these rows'}; up to {100 * self.max_bad_share:g} % of a "
            f"file's rows may be bad{key}",
        )
