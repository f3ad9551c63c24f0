"""What reading kept, dropped and refused, with file and line."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from upcycle.errors import DataError

MAX_BAD_SHARE = 0.01
_EXAMPLES = 5


@dataclass(frozen=True)
class Document:
    """One piece of text; either `text` or `messages` is given.

    Attributes:
        source: where it came from, as file or file:row.
        text: plain text.
        messages: a chat, each message with "role" and "content".
    """

    source: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass
class Ledger:
    """Counts of what a reader saw.

    Attributes:
        kept: documents handed on.
        dropped: rows without text (empty, null, no such key), by reason: nothing is lost.
        bad: rows that cannot be read, by reason; more than `MAX_BAD_SHARE` of a file is an error.
        repaired: rows with lone surrogates, which became U+FFFD.
        examples: the first few bad rows, as file:line and reason.
    """

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    examples: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, where: str, reason: str) -> None:
        """Count a row that cannot be read."""
        self.bad[reason.partition(":")[0]] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append((where, reason))

    def check(self, name: str) -> None:
        """Judge one file's ledger.

        Raises:
            DataError: too many bad rows, or no document at all.
        """
        num_bad = self.bad.total()
        rows = self.kept + num_bad + self.dropped.total()
        if num_bad > MAX_BAD_SHARE * rows:
            raise DataError(
                f"{num_bad} of {rows} rows of {name} cannot be read: "
                + "; ".join(f"{where}: {reason}" for where, reason in self.examples),
                where=self.examples[0][0],
                fix=f"mend these rows; up to {MAX_BAD_SHARE:.0%} of a file's rows may be bad",
            )
        if not self.kept:
            reasons = ", ".join(f"{count} {why}" for why, count in self.dropped.items())
            raise DataError(
                f"no row of {name} has text ({reasons or 'there are no rows'})",
                where=name,
                fix="call that column 'text', or name it in a recipe with text_column",
            )

    def add(self, other: "Ledger") -> None:
        """Add another file's counts."""
        self.kept += other.kept
        self.dropped += other.dropped
        self.bad += other.bad
        self.repaired += other.repaired
        self.examples += other.examples

    @property
    def has_losses(self) -> bool:
        """Whether any row was dropped, refused or changed."""
        return bool(self.dropped or self.bad or self.repaired)

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{self.kept} documents"]
        parts += [f"{count} dropped ({why})" for why, count in self.dropped.items()]
        parts += [f"{count} bad ({why})" for why, count in self.bad.items()]
        if self.repaired:
            parts.append(f"{self.repaired} with lone surrogates repaired")
        return ", ".join(parts)


def document_of(
    row: Mapping[str, Any], where: str, text_column: str, ledger: Ledger
) -> Document | None:
    """The document in a row, or None after counting why there is none."""
    text, messages = row.get(text_column), row.get("messages")
    if text is None and messages is None:
        reason = f"null {text_column!r}" if text_column in row else f"without {text_column!r}"
        ledger.dropped[reason] += 1
        return None
    if text is None:
        return _chat_of(messages, where, ledger)
    if not isinstance(text, str):
        ledger.refuse(where, f"{text_column!r} is not text: {type(text).__name__}")
        return None
    if not text.strip():
        ledger.dropped["empty"] += 1
        return None
    ledger.kept += 1
    return Document(where, text=_without_surrogates(text, ledger))


def _chat_of(messages: Any, where: str, ledger: Ledger) -> Document | None:
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not is_chat:
        ledger.refuse(where, "'messages' is no list of messages with a role")
        return None
    if not messages:
        ledger.dropped["empty"] += 1
        return None
    ledger.kept += 1
    return Document(where, messages=tuple(messages))


def _without_surrogates(text: str, ledger: Ledger) -> str:
    """Lone surrogates cannot be encoded; U+FFFD stands in for each."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        ledger.repaired += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
