"""What a comparison found: plain numbers, each key of report.json's `comparison` documented here.

Likelihoods are in nats unless a name says bits; per-token means are over all scored tokens. A
number that is not finite is null in JSON, and is read as NaN. Importing this loads no torch.
"""

from dataclasses import asdict, dataclass
from typing import Any

from upcycle.checkpoint.manifest import Number
from upcycle.options.evaluate import Margins


@dataclass(frozen=True)
class Text:
    """The held-out text that every model read.

    Attributes:
        files: names of the files, without their folders.
        hashes: content hash of each file, in the same order.
        packaged: whether it is the text that ships with upcycle.
        documents: documents of which at least one token was scored.
        windows: pieces that were scored, each from one document.
        tokens: tokens scored, the first of every window left out.
        bytes: UTF-8 bytes of the scored tokens' text.
        words: words of it, separated by white space.
        sequence_length: longest window in tokens; windows do not overlap, so the context of a
            token is what precedes it in its window.
        bos: whether the tokenizer starts each document with its BOS token.
        losses: what of the files was not used as it stands, with counts; empty where all was.
    """

    files: list[str]
    hashes: list[str]
    packaged: bool
    documents: int
    windows: int
    tokens: int
    bytes: int
    words: int
    sequence_length: int
    bos: bool
    losses: str = ""

    @property
    def name(self) -> str:
        """What it is called, for people."""
        return "the packaged held-out text" if self.packaged else ", ".join(self.files)


@dataclass(frozen=True)
class KVCache:
    """The KV cache of one sequence, all layers, keys and values.

    Attributes:
        stored_dtype: dtype of the checkpoint's weights, which serving uses for the cache.
        bytes_per_token: counted from the configuration, in `stored_dtype`.
        measured_dtype: dtype of the comparison's forward passes.
        predicted_bytes_per_token: counted from the configuration, in `measured_dtype`.
        measured_bytes_per_token: bytes of the tensors in the cache object after a real forward
            pass, divided by its tokens.
    """

    stored_dtype: str
    bytes_per_token: int
    measured_dtype: str
    predicted_bytes_per_token: int
    measured_bytes_per_token: Number


@dataclass(frozen=True)
class Spread:
    """How a per-token quantity is distributed.

    Attributes:
        mean: the mean over tokens.
        median: half of the tokens lie below.
        p90: 90 % of the tokens lie below.
        p99: 99 % of the tokens lie below.
        max: the largest.
    """

    mean: Number
    median: Number
    p90: Number
    p99: Number
    max: Number


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval.

    Attributes:
        low: its lower end.
        high: its upper end.
    """

    low: Number
    high: Number


@dataclass(frozen=True)
class Bucket:
    """Tokens that were predicted from a like amount of context.

    Attributes:
        first: fewest preceding tokens in the window.
        last: most preceding tokens.
        tokens: tokens scored in this bucket.
        kl_mean: mean KL(source || model).
        nll_difference: mean NLL of the model minus the source's.
    """

    first: int
    last: int
    tokens: int
    kl_mean: Number
    nll_difference: Number


@dataclass(frozen=True)
class Histogram:
    """Counts between edges; the outer bins hold everything beyond them too.

    Attributes:
        edges: n + 1 ascending values.
        counts: n counts.
    """

    edges: list[Number]
    counts: list[int]


@dataclass(frozen=True)
class WorstToken:
    """A token that the model finds much less likely than the source does.

    Attributes:
        before: text before it.
        token: its own text.
        source_nll: NLL under the source.
        model_nll: NLL under the model.
    """

    before: str
    token: str
    source_nll: Number
    model_nll: Number


@dataclass(frozen=True)
class Divergence:
    """How a model differs from the source on the same tokens.

    Attributes:
        kl: KL(source || model) per token.
        top1_agreement: share of tokens where both rank the same token first.
        nll_difference: mean NLL of the model minus the source's.
        nll_interval: paired bootstrap over documents of `nll_difference`; None with one document.
        by_position: the same by the amount of preceding context, in powers of two.
        nll_histogram: per-token NLL differences.
        worst_tokens: the largest of them, the worst first.
    """

    kl: Spread
    top1_agreement: Number
    nll_difference: Number
    nll_interval: Interval | None
    by_position: list[Bucket]
    nll_histogram: Histogram
    worst_tokens: list[WorstToken]


@dataclass(frozen=True)
class Model:
    """One checkpoint.

    Attributes:
        label: "source", "converted", "uptrained" or the folder's name.
        num_parameters: stored parameters, tied ones once.
        weight_bytes: bytes of the tensors on disk.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: KV heads of a layer.
        kv_cache: what its cache takes.
        nll: mean negative log-likelihood per token, nats.
        perplexity: exp(nll), per token of this tokenizer; None above e^100.
        word_perplexity: exp(total NLL / words); None above e^100, as of text without spaces.
        bits_per_byte: total NLL in bits / bytes; comparable across tokenizers.
        divergence: against the source; None for the source.
    """

    label: str
    num_parameters: int
    weight_bytes: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_cache: KVCache
    nll: Number
    perplexity: float | None
    word_perplexity: float | None
    bits_per_byte: Number
    divergence: Divergence | None


@dataclass(frozen=True)
class NoiseFloor:
    """The source against itself, scored in batches of another size.

    A difference between models below these numbers is arithmetic, not damage.

    Attributes:
        batch_sizes: windows per batch of the two passes.
        tokens: tokens scored.
        kl_mean: mean KL between the two passes.
        kl_max: largest KL of a token.
        nll_difference_mean: mean absolute NLL difference of a token.
        nll_difference_max: largest absolute NLL difference of a token.
        top1_agreement: share of tokens with the same first choice.
    """

    batch_sizes: list[int]
    tokens: int
    kl_mean: Number
    kl_max: Number
    nll_difference_mean: Number
    nll_difference_max: Number
    top1_agreement: Number


@dataclass(frozen=True)
class Continuation:
    """What one model wrote, decoded greedily. The whole text is `agreed + diverging + rest`.

    Attributes:
        label: the model.
        tokens: token ids.
        first_divergence: index of the first token that differs from the source's; None for none.
        agreed: text before it.
        diverging: text of that token.
        rest: text after it.
        repetition: share of 4-grams of tokens that occurred earlier in the continuation.
    """

    label: str
    tokens: list[int]
    first_divergence: int | None
    agreed: str
    diverging: str
    rest: str
    repetition: Number


@dataclass(frozen=True)
class Generation:
    """One prompt and what every model made of it.

    Attributes:
        prompt: the text to continue.
        continuations: one per model, the source's first.
    """

    prompt: str
    continuations: list[Continuation]


@dataclass(frozen=True)
class Margin:
    """One limit of the recipe and whether the judged model keeps it.

    Attributes:
        name: "kl_mean" or "nll_increase".
        label: the judged model: the last one given.
        limit: the largest value that passes.
        value: what was measured. For `nll_increase` the upper end of the 95 % interval, where
            there is one: the increase is then below the limit with 97.5 % confidence.
        passed: `value <= limit`.
    """

    name: str
    label: str
    limit: Number
    value: Number
    passed: bool


@dataclass(frozen=True)
class EvaluationSettings:
    """How the models ran.

    Attributes:
        device: "cpu", "cuda" or "mps".
        dtype: dtype of weights and arithmetic.
        batch_size: windows per batch.
        new_tokens: longest continuation.
        bootstrap_resamples: resamples of the confidence intervals.
    """

    device: str
    dtype: str
    batch_size: int
    new_tokens: int
    bootstrap_resamples: int


@dataclass(frozen=True)
class Comparison:
    """The source and every candidate on the same text.

    Attributes:
        text: what was read.
        settings: how.
        models: the source first, then the candidates as given.
        noise_floor: what arithmetic alone changes.
        generations: greedy continuations side by side.
        margins: the limits that were set; empty where none were.
    """

    text: Text
    settings: EvaluationSettings
    models: list[Model]
    noise_floor: NoiseFloor
    generations: list[Generation]
    margins: list[Margin]

    @property
    def passed(self) -> bool:
        """Whether no margin failed."""
        return all(margin.passed for margin in self.margins)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values, keyed by the attribute names above."""
        return asdict(self)


def _nll_increase(divergence: Divergence) -> float:
    """The upper end of the interval: not worse than the limit, at 97.5 % confidence."""
    interval = divergence.nll_interval
    return interval.high if interval else divergence.nll_difference


MARGINS = {"kl_mean": lambda divergence: divergence.kl.mean, "nll_increase": _nll_increase}


def judge(model: Model, margins: Margins) -> list[Margin]:
    """Hold one model against every margin that is set."""
    assert model.divergence is not None
    judged = []
    for name, limit in margins:
        if limit is None:
            continue
        value = MARGINS[name](model.divergence)
        judged.append(Margin(name, model.label, limit, value, value <= limit))
    return judged
