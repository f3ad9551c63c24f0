"""Whether a program takes and gives what one of `upcycle export` does, so that it can be fed."""

from collections import Counter
from collections.abc import Iterator

from upcycle.errors import ExportError
from upcycle.program.graph import Function, Graph
from upcycle.program.host_cache import new_names, past_names
from upcycle.program.noted import ExportManifest
from upcycle.program.signature import DECODE, INPUT_IDS, LOGITS, POSITION, PREFILL

_Shape = tuple[int | None, ...]


def check_interface(graph: Graph, manifest: ExportManifest, where: str) -> None:
    """See that inputs, outputs and states have the shapes that the manifest is of.

    Args:
        graph: of the program.
        manifest: of it.
        where: it is, for the error.

    Raises:
        ExportError: one is missing, unknown or of another shape.
    """
    for name in sorted({DECODE, PREFILL} & graph.functions.keys()):
        for problem in _problems(graph.functions[name], manifest, single=name == DECODE):
            raise ExportError(
                f"the program is not one that `upcycle export` makes: {problem}",
                where=f"{where}, function {name!r}",
                fix="export the checkpoint again",
            )


def _problems(function: Function, manifest: ExportManifest, *, single: bool) -> Iterator[str]:
    decoder, context = manifest.result.decoder, manifest.options.context
    layers, groups = decoder.num_layers, decoder.num_key_value_heads
    widths = (decoder.head_dim, decoder.value_head_dim)
    tokens = 1 if single else _last_axis(function, INPUT_IDS)
    if not 0 < tokens <= context:
        yield f"it takes {tokens} tokens, and the context is {context}"
    inputs: dict[str, _Shape] = {INPUT_IDS: (1, tokens), POSITION: (1,)}
    inputs |= dict.fromkeys(decoder.masks, (1, 1, tokens, context))
    outputs: dict[str, _Shape] = {LOGITS: (1, tokens, _last_axis(function, LOGITS))}
    if function.states:
        yield from _problems_of_states(function, layers, (groups, context), widths)
    else:
        pairs = zip(past_names(layers), new_names(layers), widths * layers, strict=True)
        for past, new, width in pairs:
            inputs[past] = (1, groups, context, width)
            outputs[new] = (1, groups, tokens, width)
    for names, wanted in ((function.inputs, inputs), (function.outputs, outputs)):
        for name, expected in wanted.items():
            found = function.types[name].shape if name in names else None
            if found != expected or 0 in expected:
                yield f"{name!r} has the shape {found} instead of {expected}"
    if unknown := set(function.inputs) - inputs.keys():
        yield f"it has the input {min(unknown)!r}"


def _problems_of_states(
    function: Function, layers: int, slots: tuple[int, int], widths: tuple[int, int]
) -> Iterator[str]:
    """States of K and V, which chunks of a model have of their own layers."""
    found: Counter[_Shape] = Counter()
    for state in function.states.values():
        found[state.shape[1:]] += (state.shape[0] or 0) if state.shape else 0
    wanted = Counter({(*slots, width): 0 for width in widths})
    for width in widths:
        wanted[(*slots, width)] += layers
    if found != wanted:
        shapes = [list(state.shape) for state in function.states.values()]
        yield f"its states {shapes} are not K and V of {layers} layers"


def _last_axis(function: Function, name: str) -> int:
    """How long the last axis of an input or output is; 0 where there is none of that name."""
    if name not in (*function.inputs, *function.outputs):
        return 0
    return (function.types[name].shape[-1:] or (0,))[0] or 0
