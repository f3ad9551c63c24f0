"""What an exported graph must contain, checked in the saved package after every export.

The converter drops work without an error in several known cases, such as a cache write at a
tensor index, which takes the K and V projections along.
"""

from upcycle.export.decoder import DecoderShape
from upcycle.export.graph import Function


class BrokenExportError(RuntimeError):
    """The converter produced another program than the one that was traced: our bug."""


def check_graph(function: Function, shape: DecoderShape, *, repeated: bool) -> None:
    """Compare a decode graph with the model that it was made from.

    Args:
        function: the graph, from the saved package.
        shape: what the model does in one forward pass.
        repeated: whether K and V are copied to all query heads.

    Raises:
        BrokenExportError: linear layers, cache writes or copies of K and V are missing or extra.
    """
    grouped = shape.num_attention_heads != shape.num_key_value_heads
    expected = {
        "linear": shape.num_linears,
        "writes of each state": [shape.num_layers] * 2,
        "tile of K and V": 2 * shape.num_layers if repeated and grouped else 0,
    }
    found = {
        "linear": function.histogram["linear"],
        "writes of each state": sorted(function.state_writes.values()),
        "tile of K and V": sum(tile.of_kv for tile in function.tiles),
    }
    wrong = [
        f"{name}: {found[name]} instead of {count}"
        for name, count in expected.items()
        if found[name] != count
    ]
    if wrong:
        raise BrokenExportError(f"the converted program is not the model's ({'; '.join(wrong)})")
