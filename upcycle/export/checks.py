"""What an exported graph must contain, checked in the saved package after every export.

The converter drops work without an error in several known cases, such as a cache write at a
tensor index, which takes the K and V projections along.
"""

from torch import Tensor

from upcycle.errors import ExportError
from upcycle.options.attention_forms import FORMS
from upcycle.options.export import STATE, ExportOptions
from upcycle.program.graph import Function
from upcycle.program.noted import DecoderShape

_SHARED = 1.02  # all functions of a package weigh at most so much more than one


class BrokenExportError(RuntimeError):
    """The converter produced another program than the one that was traced: our bug."""


def check_graph(function: Function, shape: DecoderShape, options: ExportOptions) -> None:
    """Compare a function's graph with the model that it was made from.

    Args:
        function: the graph, from the saved package.
        shape: what the model does in one forward pass.
        options: say in which form it attends, and whether K and V are kept in states; they are
            inputs and outputs otherwise.

    Raises:
        BrokenExportError: linear layers, cache writes or copies of K and V are missing or extra.
    """
    copies, states = FORMS[options.attention].copies, options.kv_cache == STATE
    grouped = shape.num_attention_heads != shape.num_key_value_heads
    caches = 2 * shape.num_layers
    expected = {
        "linear": shape.num_linears,
        "writes of each state": [shape.num_layers] * 2 if states else [],
        "inputs and outputs of K and V": (0, 0) if states else (caches, caches),
        # Where K and V are inputs, the new tokens' lie apart and are copied apart.
        "tile of K and V": caches * (1 if states else 2) * copies if grouped else 0,
        "concat of K and V": 0,
    }
    found = {
        "linear": function.histogram["linear"] + function.histogram["conv"],
        "writes of each state": sorted(function.state_writes.values()),
        "inputs and outputs of K and V": (
            len(function.kv.cache_inputs),
            len(function.kv.cache_outputs),
        ),
        "tile of K and V": sum(tile.of_kv for tile in function.tiles),
        "concat of K and V": sum(
            op.type == "concat" and bool(function.kv.values.intersection(op.outputs))
            for op in function.operations
        ),
    }
    wrong = [
        f"{name}: {found[name]} instead of {count}"
        for name, count in expected.items()
        if found[name] != count
    ]
    if wrong:
        raise BrokenExportError(f"the converted program is not the model's ({'; '.join(wrong)})")


def check_chunk(weights: int, expected: int) -> None:
    """Compare the weights of a chunk with those that its layers have.

    Args:
        weights: bytes of the package's.
        expected: the most that its layers may need.

    Raises:
        BrokenExportError: it has weights of other chunks too.
    """
    if weights > expected:
        raise BrokenExportError(
            f"a chunk has {weights:,} B of weights, and its layers have {expected:,} B"
        )


def check_sharing(alone: int, together: int) -> None:
    """Compare the weights of a package of several functions with those of one function.

    Args:
        alone: bytes of one function's weights.
        together: bytes of the package's.

    Raises:
        BrokenExportError: the functions do not share their weights.
    """
    if together > _SHARED * alone:
        raise BrokenExportError(
            f"the functions do not share their weights: {together:,} B, one alone has {alone:,} B"
        )


def check_agreement(
    found: Tensor, expected: Tensor, *, tolerance: float, what: str, where: str, fix: str
) -> None:
    """Refuse a model that gives other logits in the form in which it is to be exported.

    Args:
        found: [..., V] its logits in that form.
        expected: [..., V] its own.
        tolerance: the largest difference that passes, as a part of the logits' range.
        what: the form, for the message.
        where: the model's class.
        fix: what would be valid.

    Raises:
        ExportError: they differ.
    """
    difference = (found - expected).abs().max().item()
    limit = tolerance * (expected.max() - expected.min()).item()
    if not difference <= limit:
        raise ExportError(
            f"the logits of {what} differ from the model's own by {difference:.2g}, more than "
            f"{limit:.2g}",
            where=where,
            fix=fix,
        )
