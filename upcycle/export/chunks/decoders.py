"""A decoder cut into chunks of consecutive layers, each of which is exported as a package.

No family's code is touched: the model stays whole, and while a chunk runs, the layers outside it
hand on what they get. What comes before its first layer is replaced by the chunk's input, and what
follows its last layer is not used, so that conversion drops both.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.export.checks import check_agreement
from upcycle.export.chunks.anatomy import Anatomy
from upcycle.export.chunks.sizes import share_layers, stored_sizes
from upcycle.export.decoder import as_tuple
from upcycle.export.masks import masks_of_layers
from upcycle.export.quantize.preparation import Prepared
from upcycle.options.export import ExportOptions
from upcycle.program.signature import HIDDEN, NEW_HIDDEN, Input, Signature

_COMPARED = 8  # tokens
_TOLERANCE = 1e-4  # of the range of the logits


class ChunkDecoder(nn.Module):
    """Consecutive layers of a decoder; tokens or hidden states in, hidden states or logits out.

    Args:
        whole: the decoder.
        anatomy: the model's.
        layers: which ones it has.
        max_bytes: what its weights may take when they are stored.

    Attributes:
        shape: what these layers compute.
    """

    def __init__(self, whole: Any, anatomy: Anatomy, layers: range, max_bytes: int) -> None:
        super().__init__()
        self.layers = layers
        self.max_bytes = max_bytes
        self.shape = whole.shape.updated(
            num_layers=len(layers),
            num_linears=anatomy.linears(layers),
            masks=masks_of_layers(whole.model, whole.masks, layers),
        )
        self.model = whole.model  # its constants are named after the whole model's parameters
        self._anatomy = anatomy
        self._is_first = layers.start == 0
        self._is_last = layers.stop == whole.shape.num_layers
        own = type(whole)(
            whole.model,
            self.shape,
            whole.context,
            argmax=whole.argmax and self._is_last,
            first_layer=layers.start,
        ).eval()
        for name, buffer in own.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._decoder = [own]  # no submodule: it would give the model's parameters other names

    def signature(self, queries: int) -> Signature:
        """The decoder's, with hidden states; K and V have the model's layer numbers."""
        own: Signature = self._decoder[0].signature(queries)
        (tokens, *inputs), (logits, *outputs) = own.inputs, own.outputs
        hidden = Input(HIDDEN, (1, queries, self._anatomy.width), "float16")
        return replace(
            own,
            inputs=(tokens if self._is_first else hidden, *inputs),
            outputs=(logits if self._is_last else NEW_HIDDEN, *outputs),
        )

    def example_inputs(self, queries: int) -> tuple[Tensor, ...]:
        """As for the decoder, but behind the first chunk hidden states [1, T, D] for its tokens."""
        tokens, *others = self._decoder[0].example_inputs(queries)
        hidden = torch.zeros(1, queries, self._anatomy.width)
        return (tokens if self._is_first else hidden, *others)

    def forward(self, tokens_or_hidden: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Hidden states [1, T, D] or logits [1, T, vocabulary], and what else the decoder gives.

        Args:
            tokens_or_hidden: [1, T] tokens for the first chunk, [1, T, D] for the others.
            others: as for the decoder, with the masks of these layers only.
        """
        if self._is_first:
            tokens, hidden = tokens_or_hidden, None
        else:
            tokens = torch.zeros(1, int(tokens_or_hidden.shape[1]), dtype=torch.int32)
            hidden = tokens_or_hidden
        with self._cut(hidden) as made:
            found = self._decoder[0](tokens, *others)
        if self._is_last:
            return found  # type: ignore[no-any-return]
        return made[0] if isinstance(found, Tensor) else (made[0], *found[1:])

    @contextmanager
    def _cut(self, hidden: Tensor | None) -> Iterator[list[Tensor]]:
        """The model as only these layers, from `hidden` on; yields what will hold their result."""
        made: list[Tensor] = []
        modules = self._anatomy.layers
        first, last = modules[self.layers.start], modules[self.layers.stop - 1]
        with ExitStack() as stack:
            stack.enter_context(last.register_forward_hook(lambda *call: made.append(call[-1])))
            if hidden is not None:
                hook = first.register_forward_pre_hook(lambda _, given: (hidden, *given[1:]))
                stack.enter_context(hook)
            for i in set(range(len(modules))).difference(self.layers):
                modules[i].forward = _hand_on
                stack.callback(delattr, modules[i], "forward")
            yield made


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """The `forward` of a layer that does nothing."""
    return hidden_states


def cut_decoder(
    whole: Any, options: ExportOptions, prepared: Prepared | None = None
) -> list[ChunkDecoder]:
    """The fewest chunks of a decoder whose stored weights are within a budget.

    Args:
        whole: the decoder.
        options: the budget is their `chunk_size`.
        prepared: how its weights are quantised, None for fp16.

    Raises:
        ExportError: a layer alone is over the budget, or the layers know more of each other than
            the hidden states.
    """
    assert options.chunk_size is not None
    anatomy = Anatomy.of(whole)
    sizes = stored_sizes(anatomy, len(whole.masks), options, prepared)
    chunks = [
        ChunkDecoder(whole, anatomy, layers, sizes.of(layers)).eval()
        for layers in share_layers(sizes, options.chunk_size)
    ]
    _check_chain(whole, chunks)
    return chunks


def _check_chain(whole: Any, chunks: Sequence[ChunkDecoder]) -> None:
    """Refuse a model whose chunks, one after the other, are not the model."""
    tokens, *others = whole.example_inputs(_COMPARED)
    passed = tokens = torch.arange(_COMPARED, dtype=tokens.dtype)[None] + 1
    with torch.no_grad():
        expected = as_tuple(whole(tokens, *others))[0]
        for chunk in chunks:
            _, *others = chunk.example_inputs(_COMPARED)
            passed = as_tuple(chunk(passed, *others))[0]
    check_agreement(
        passed,
        expected,
        tolerance=_TOLERANCE,
        what="the chunks, whose layers know more of each other than the hidden states,",
        where=type(whole.model).__name__,
        fix="omit --chunk-size",
    )
