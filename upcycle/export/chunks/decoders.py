"""A decoder cut into chunks of consecutive layers, each of which is exported as a package.

No family's code is touched: the model stays whole, and while a chunk runs, the layers outside it
hand on what they get. What comes before its first layer is replaced by the chunk's input, and what
follows its last layer is not used, so that conversion drops both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from upcycle.export.checks import check_agreement
from upcycle.export.chunks.anatomy import Anatomy
from upcycle.export.chunks.sizes import share_layers, stored_sizes
from upcycle.export.decoder import DecoderShape
from upcycle.export.masks import masks_of_layers
from upcycle.export.quantize.preparation import Prepared
from upcycle.options.export import ExportOptions
from upcycle.program.host_cache import new_names, past_names
from upcycle.program.signature import HIDDEN, INPUT_IDS, LOGITS, NEW_HIDDEN, Input, Signature

_COMPARED = 8  # tokens
_TOLERANCE = 1e-4  # of the range of the logits


class ChunkDecoder(nn.Module):
    """Consecutive layers of a decoder; tokens or hidden states in, hidden states or logits out.

    Args:
        whole: the decoder.
        shape: the whole decoder's.
        anatomy: the model's.
        layers: which ones it has.
        max_bytes: what its weights may take when they are stored.

    Attributes:
        shape: what these layers compute.
    """

    def __init__(
        self, whole: Any, shape: DecoderShape, anatomy: Anatomy, layers: range, max_bytes: int
    ) -> None:
        super().__init__()
        self.layers = layers
        self.max_bytes = max_bytes
        self.shape = replace(
            shape,
            num_layers=len(layers),
            num_linears=anatomy.linears(layers),
            masks=masks_of_layers(whole.model, shape.masks, layers),
        )
        self.model = whole.model  # its constants are named after the whole model's parameters
        self._anatomy = anatomy
        self._is_first = layers.start == 0
        self._is_last = layers.stop == shape.num_layers
        argmax = whole.argmax and self._is_last
        own = type(whole)(whole.model, self.shape, whole.context, argmax=argmax).eval()
        for name, buffer in own.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._decoder = [own]  # no submodule: it would give the model's parameters other names

    def signature(self, queries: int) -> Signature:
        """The decoder's, with hidden states; K and V have the model's layer numbers."""
        whole: Signature = self._decoder[0].signature(queries)
        count = len(self.layers)
        numbered = dict(
            zip(
                [*past_names(count), *new_names(count)],
                [
                    *past_names(self.layers.stop)[2 * self.layers.start :],
                    *new_names(self.layers.stop)[2 * self.layers.start :],
                ],
                strict=True,
            )
        )
        inputs = [each._replace(name=numbered.get(each.name, each.name)) for each in whole.inputs]
        outputs = [numbered.get(name, name) for name in whole.outputs]
        if not self._is_first:
            assert inputs[0].name == INPUT_IDS
            inputs[0] = Input(HIDDEN, (1, queries, self._anatomy.width), "float16")
        if not self._is_last:
            assert outputs[0] == LOGITS
            outputs[0] = NEW_HIDDEN
        return replace(whole, inputs=tuple(inputs), outputs=tuple(outputs))

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
        hooks = [
            self.model.register_forward_pre_hook(self._shift_cache, with_kwargs=True),
            last.register_forward_hook(lambda *call: made.append(call[-1])),
        ]
        if hidden is not None:
            hooks.append(first.register_forward_pre_hook(lambda _, given: (hidden, *given[1:])))
        outside = [i for i in range(len(modules)) if i not in self.layers]
        for i in outside:
            modules[i].forward = _hand_on
        try:
            yield made
        finally:
            for i in outside:
                del modules[i].forward
            for hook in hooks:
                hook.remove()

    def _shift_cache(
        self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return given, {**named, "cache": _ShiftedCache(named["cache"], self.layers.start)}


class _ShiftedCache:
    """A cache for some of a model's layers, numbered from 0; the model has other numbers for them.

    Args:
        cache: of these layers.
        first: the model's number of their first.
    """

    def __init__(self, cache: Any, first: int) -> None:
        self._cache = cache
        self._offset = first

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return self._cache.update(keys, values, layer_idx - self._offset)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = self._cache.get_seq_length()  # that of all layers
        return length


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """The `forward` of a layer that does nothing."""
    return hidden_states


def cut_decoder(
    whole: Any, shape: DecoderShape, options: ExportOptions, prepared: Prepared | None = None
) -> list[ChunkDecoder]:
    """The fewest chunks of a decoder whose stored weights are within a budget.

    Args:
        whole: the decoder.
        shape: what it computes.
        options: the budget is their `chunk_size`.
        prepared: how its weights are quantised, None for fp16.

    Raises:
        ExportError: a layer alone is over the budget, or the layers know more of each other than
            the hidden states.
    """
    assert options.chunk_size is not None
    anatomy = Anatomy.of(whole)
    sizes = stored_sizes(anatomy, len(shape.masks), options, prepared)
    chunks = [
        ChunkDecoder(whole, shape, anatomy, layers, sizes.of(layers)).eval()
        for layers in share_layers(sizes, options.chunk_size)
    ]
    _check_chain(whole, chunks)
    return chunks


def _check_chain(whole: Any, chunks: Sequence[ChunkDecoder]) -> None:
    """Refuse a model whose chunks, one after the other, are not the model."""
    tokens, *others = whole.example_inputs(_COMPARED)
    passed = tokens = torch.arange(_COMPARED, dtype=tokens.dtype)[None] + 1
    with torch.no_grad():
        expected = _first(whole(tokens, *others))
        for chunk in chunks:
            _, *others = chunk.example_inputs(_COMPARED)
            passed = _first(chunk(passed, *others))
    check_agreement(
        passed,
        expected,
        tolerance=_TOLERANCE,
        what="the chunks, whose layers know more of each other than the hidden states,",
        where=type(whole.model).__name__,
        fix="omit --chunk-size",
    )
