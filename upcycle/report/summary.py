"""What the tables and the verdict say, worked out once for HTML, Markdown and the terminal."""

from collections.abc import Callable
from dataclasses import dataclass

from upcycle.evaluation.results import (
    Comparison,
    Continuation,
    Divergence,
    Interval,
    KVCache,
    Model,
    Text,
)
from upcycle.pages import formatting as fmt

MARGIN_NAMES = {
    "kl_mean": "mean KL from the source",
    "nll_increase": "NLL increase, upper end of its 95 % interval",
}
EXPORT_NAMES = {
    "source": "source",
    "repeat-kv": "merged, repeat-kv",
    "qfold": "merged, Q-fold",
}


@dataclass(frozen=True)
class Row:
    """One quantity of every model.

    Attributes:
        name: the quantity.
        unit: its unit or what it needs to be understood; may be empty.
        cells: one text per model.
    """

    name: str
    unit: str
    cells: list[str]


@dataclass(frozen=True)
class PageSection:
    """Rows that belong together."""

    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Verdict:
    """What the margins say.

    Attributes:
        state: "passed", "failed" or "open" (no margins set).
        headline: one sentence.
    """

    state: str
    headline: str


@dataclass(frozen=True)
class KeyFigure:
    """One number worth a tile."""

    name: str
    value: str
    detail: str


def verdict(comparison: Comparison) -> Verdict:
    """The margins in one sentence."""
    margins = comparison.margins
    label = comparison.models[-1].label
    if not margins:
        return Verdict("open", "No margins set: the numbers below are for you to judge.")
    failed = [margin for margin in margins if not margin.passed]
    if failed:
        return Verdict("failed", f"{label} fails {len(failed)} of {len(margins)} margins.")
    kept = {1: "its margin", 2: "both margins"}.get(len(margins), f"all {len(margins)} margins")
    return Verdict("passed", f"{label} keeps {kept}.")


def title(comparison: Comparison) -> str:
    """What was turned into what."""
    source, last = comparison.models[0], comparison.models[-1]
    before, after = source.num_key_value_heads, last.num_key_value_heads
    heads = f"{before} KV heads" if before == after else f"{before} → {after} KV heads"
    return f"{source.num_attention_heads} query heads, {heads}"


def key_figures(comparison: Comparison) -> list[KeyFigure]:
    """The judged model (the last one) in four numbers."""
    source, judged = comparison.models[0], comparison.models[-1]
    difference = judged.divergence
    assert difference is not None, "only the source has none"
    before = source.kv_cache.bytes_per_token
    after = judged.kv_cache.bytes_per_token
    return [
        KeyFigure(
            "KV cache",
            f"{fmt.factor(before / after)} smaller" if after != before else "unchanged",
            f"{fmt.integer(after)} of {fmt.integer(before)} bytes per token",
        ),
        KeyFigure(
            "NLL increase",
            fmt.signed(difference.nll_difference),
            f"nats per token, 95 % CI {interval(difference.nll_interval)}",
        ),
        KeyFigure(
            "KL from the source",
            fmt.nats(difference.kl.mean),
            f"nats per token, median {fmt.nats(difference.kl.median)}",
        ),
        KeyFigure(
            "Top-1 agreement",
            fmt.percent(difference.top1_agreement),
            f"of {fmt.integer(comparison.text.tokens)} held-out tokens",
        ),
    ]


def sections(comparison: Comparison) -> list[PageSection]:
    """The main table: quantities down, models across."""
    models = comparison.models

    def row(name: str, unit: str, cell: Callable[[Model], str]) -> Row:
        return Row(name, unit, [cell(model) for model in models])

    def change(name: str, unit: str, cell: Callable[[Divergence], str]) -> Row:
        def or_missing(model: Model) -> str:
            return cell(model.divergence) if model.divergence else fmt.MISSING

        return row(name, unit, or_missing)

    def cache(name: str, dtype: str, size: Callable[[KVCache], float]) -> Row:
        return row(name, f"bytes, {dtype}", lambda model: fmt.integer(size(model.kv_cache)))

    stored, measured = models[0].kv_cache.stored_dtype, models[0].kv_cache.measured_dtype
    return [
        PageSection(
            "Size",
            [
                row("Query / KV heads", "", _heads),
                row("Parameters", "", lambda m: fmt.millions(m.num_parameters)),
                row("Weights on disk", "", lambda m: fmt.binary_bytes(m.weight_bytes)),
                cache("KV cache per token", stored, lambda c: c.bytes_per_token),
                cache("Predicted cache", measured, lambda c: c.predicted_bytes_per_token),
                cache("Measured cache", measured, lambda c: c.measured_bytes_per_token),
            ],
        ),
        PageSection(
            "Likelihood of the held-out text",
            [
                row("NLL", "nats/token", lambda m: fmt.nats(m.nll)),
                change("NLL increase", "nats/token", lambda d: fmt.signed(d.nll_difference)),
                change("95 % interval", "paired bootstrap", lambda d: interval(d.nll_interval)),
                row("Perplexity", "per token", lambda m: fmt.perplexity(m.perplexity)),
                row("Perplexity", "per word", lambda m: fmt.perplexity(m.word_perplexity)),
                row("Bits per byte", "", lambda m: f"{m.bits_per_byte:.4f}"),
            ],
        ),
        PageSection(
            "Divergence from the source",
            [
                change("KL mean", "nats/token", lambda d: fmt.nats(d.kl.mean)),
                change("KL median", "nats/token", lambda d: fmt.nats(d.kl.median)),
                change("KL 90th percentile", "nats/token", lambda d: fmt.nats(d.kl.p90)),
                change("KL 99th percentile", "nats/token", lambda d: fmt.nats(d.kl.p99)),
                change("KL maximum", "nats/token", lambda d: fmt.nats(d.kl.max)),
                change("Top-1 agreement", "", lambda d: fmt.percent(d.top1_agreement)),
            ],
        ),
    ]


def overview(comparison: Comparison) -> list[list[str]]:
    """The few columns that fit a terminal: a header and a row for each model."""
    header = ["", "KV heads", "NLL", "perplexity", "KL mean", "top-1", "KV bytes/token"]
    rows = []
    for model in comparison.models:
        change = model.divergence
        rows.append(
            [
                model.label,
                str(model.num_key_value_heads),
                fmt.nats(model.nll),
                fmt.perplexity(model.perplexity),
                fmt.nats(change.kl.mean) if change else fmt.MISSING,
                fmt.percent(change.top1_agreement) if change else fmt.MISSING,
                fmt.integer(model.kv_cache.bytes_per_token),
            ]
        )
    return [header, *rows]


def margin_lines(comparison: Comparison) -> list[str]:
    """Each margin that was set, as one line."""
    return [
        f"{'passed' if margin.passed else 'FAILED'}: {MARGIN_NAMES[margin.name]} "
        f"{fmt.nats(margin.value)}, limit {fmt.nats(margin.limit)} nats per token"
        for margin in comparison.margins
    ]


def interval(bounds: Interval | None) -> str:
    """A confidence interval: "[+0.0281, +0.0343]", or a dash where there is none."""
    return f"[{fmt.signed(bounds.low)}, {fmt.signed(bounds.high)}]" if bounds else fmt.MISSING


def window_rule(text: Text) -> str:
    """How the text was cut, in the words that perplexities of papers need beside them."""
    start = "after one BOS token" if text.bos else "with no BOS token"
    return (
        f"{fmt.integer(text.documents)} documents, each on its own and {start}, in "
        f"{fmt.integer(text.windows)} windows of at most {text.sequence_length} tokens. "
        f"{fmt.integer(text.tokens)} tokens are scored "
        f"({fmt.integer(text.bytes)} bytes, {fmt.integer(text.words)} words); "
        "the first token of a window is context only, where it is not the document's first it is "
        "the last scored one of the window before. A document ends with an EOS token, scored too, "
        "where the tokenizer has one."
        + (f" Not all of the text was used: {text.losses}." if text.losses else "")
    )


def continuation_note(continuation: Continuation, is_source: bool) -> str:
    """How far a continuation follows the source's, and how much it repeats itself."""
    length = len(continuation.tokens)
    at = continuation.first_divergence
    repeats = f"{100 * continuation.repetition:.0f} % repeated 4-grams"
    if is_source:
        return f"{length} tokens, {repeats}"
    if at is None:
        return f"same {length} tokens, {repeats}"
    return f"diverges at token {at + 1} of {length}, {repeats}"


def _heads(model: Model) -> str:
    return f"{model.num_attention_heads} / {model.num_key_value_heads}"
