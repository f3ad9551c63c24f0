"""The options of a comparison."""

from typing import Annotated

from pydantic import Field

from upcycle.options.base import PathValue, Positive, Section, Share, Weight


class Margins(Section):
    """What the uptrained model may lose against the source; a breach is exit code 1.

    Attributes:
        kl_mean: mean KL(source || model), nats per token.
        nll_increase: mean negative log-likelihood above the source's, nats per token.
    """

    kl_mean: Weight | None = None
    nll_increase: Weight | None = None


class EvaluateOptions(Section):
    """What source, converted and uptrained are compared on.

    Attributes:
        text: files of held-out text; none means the packaged text.
        max_tokens: scored tokens at most, spread over the documents.
        sequence_length: tokens of context at most.
        prompts: continued greedily by each model.
        new_tokens: tokens per continuation.
        max_bad_share: the share of a text file's rows that may be unusable, as in `train.data`.
        margins: what may be lost.
    """

    text: Annotated[tuple[PathValue, ...], Field(strict=False)] = ()
    max_tokens: Positive = 40_000
    sequence_length: Annotated[int, Field(ge=2)] = 512
    prompts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    new_tokens: Positive = 48
    max_bad_share: Share = 0.01
    margins: Margins = Margins()
