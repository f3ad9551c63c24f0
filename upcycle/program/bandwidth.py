"""Bytes per token by the closed form, and the decoding speed that a memory bandwidth allows.

Decoding is bound by memory: each token reads every weight and the whole KV cache once. The bound
compares graphs and models; only a device tells speed.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from upcycle.attention import AttentionShape
from upcycle.kvcache.counting import parameters_saved
from upcycle.options.attention_forms import QFOLD, REPEAT_KV, AttentionForm
from upcycle.program.chunked import read_exported
from upcycle.program.counting import count_traffic
from upcycle.program.graph import Graph
from upcycle.program.inferred import inferred_shape
from upcycle.program.noted import ExportManifest, noted_manifest, required_manifest

BANDWIDTH = 55_900_000_000  # B/s
BANDWIDTH_SOURCE = (
    "fitted to one measurement on a phone: 54.30 tok/s of a 1.2B model that moves 1,030 MB/token"
)
_KV_BYTES = 2  # fp16 states
_WEIGHT_BYTES = 2  # fp16 weights


def closed_form_bytes(
    without_cache: int,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dims: int,
    context: int,
    copies: int = 0,
) -> int:
    """Bytes per token: W + L·g·C·(d+e)·2, and 2·L·H·C·(d+e)·2 more for each copy of K and V.

    A cache that `repeat_kv` copies is read at g heads, written at H heads and read at H heads.

    Args:
        without_cache: W, bytes of all but the cache.
        num_layers: L.
        num_attention_heads: H.
        num_key_value_heads: g.
        head_dims: d + e, channels of a key and a value head.
        context: C.
        copies: of K and V to all query heads, as the form of attention makes them. Without groups
            (g = H) there is nothing to copy.
    """
    per_head = num_layers * context * head_dims * _KV_BYTES
    cache = num_key_value_heads * per_head
    if num_key_value_heads < num_attention_heads:
        cache += 2 * copies * num_attention_heads * per_head
    return without_cache + cache


def tokens_per_second(bytes_per_token: float, bandwidth: float = BANDWIDTH) -> float:
    """The bound that a memory bandwidth in B/s sets."""
    return bandwidth / bytes_per_token


@dataclass(frozen=True)
class Alternative:
    """The same model with other KV heads or another attention, by the closed form."""

    name: str
    num_key_value_heads: int
    bytes_per_token: int


def alternatives(graph: Graph, without_cache: int | None = None) -> list[Alternative]:
    """What a decode graph of this model would move as MHA, GQA both ways, and MQA.

    The bytes of all but the cache are held at this graph's; an MHA model's K and V projections
    would add to them. Empty where the attention's shape is unknown or shapes are dynamic.

    Args:
        graph: of the package.
        without_cache: W, bytes of all but the cache, instead of what the graph has.
    """
    shape = attention_shape(graph)
    if shape is None or not graph.decode.is_static:
        return []
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    rows = [("MHA", heads, QFOLD)]
    if 1 < groups < heads:
        rows += [("GQA, repeat-kv", groups, REPEAT_KV), ("GQA, Q-fold", groups, QFOLD)]
    rows += [("MQA, repeat-kv", 1, REPEAT_KV)] if groups == 1 else []
    rows += [("MQA, Q-fold", 1, QFOLD)]
    if without_cache is None:
        without_cache = count_traffic(graph.decode).without_cache
    return [
        Alternative(name, kv_heads, _bytes_at(without_cache, shape, kv_heads, form))
        for name, kv_heads, form in rows
    ]


def attention_shape(graph: Graph) -> dict[str, int] | None:
    """L, H, g, d + e and C: as the package's manifest notes them, else as its graph shows them."""
    noted = exported_shape(graph)
    if noted is not None:
        return noted
    shape = inferred_shape(graph.decode)
    if shape is None or shape.pop("tokens") != 1:
        return None
    return shape


def exported_shape(graph: Graph) -> dict[str, int] | None:
    """L, H, g, d + e and C as `upcycle export` noted them in the package, or None."""
    manifest = noted_manifest(graph)
    return None if manifest is None else _shape_in(manifest)


def _shape_in(manifest: ExportManifest) -> dict[str, int]:
    decoder = manifest.result.decoder
    return {
        "num_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dims": decoder.head_dim + decoder.value_head_dim,
        "context": manifest.options.context,
    }


@dataclass(frozen=True)
class Compared:
    """What decoding one token at full context would move, by the closed form.

    Attributes:
        num_key_value_heads: g.
        kv_tiles: operations that copy K or V.
        bytes_per_token: bytes.
        tokens_per_second: the bound that the bandwidth sets.
    """

    num_key_value_heads: int
    kv_tiles: int
    bytes_per_token: int
    tokens_per_second: float


@dataclass(frozen=True)
class ExportFigures:
    """An export's section of the report.

    Attributes:
        context: C, the positions of the cache.
        operations: of the decode graph.
        kv_tiles: those of them that copy K or V.
        kv_tile_bytes: what they write per token.
        bytes_per_token: as counted in the graph, by the fields of `Traffic`, and their total.
        compared: the source, the merged model with repeat-kv and with Q-fold, by these names.
        bandwidth: B/s.
    """

    context: int
    operations: int
    kv_tiles: int
    kv_tile_bytes: int
    bytes_per_token: dict[str, int]
    compared: dict[str, Compared]
    bandwidth: int


def describe_export(source_shape: AttentionShape, package: str | Path) -> ExportFigures:
    """An export's section of the report, for a package of `upcycle export`.

    Args:
        source_shape: the source's attention, before its heads were merged.
        package: the `.mlpackage`, or the folder of chunks.

    Raises:
        ExportError: the package is damaged, or not one of ours.
    """
    graph = read_exported(Path(package))
    shape = _shape_in(required_manifest(graph, Path(package)))
    function = graph.decode
    traffic = count_traffic(function)
    groups = shape["num_key_value_heads"]
    rows = {
        "source": (source_shape.num_key_value_heads, REPEAT_KV),
        REPEAT_KV.name: (groups, REPEAT_KV),
        QFOLD.name: (groups, QFOLD),
    }
    compared = {
        name: _bytes_at(traffic.without_cache, shape, kv_heads, form)
        for name, (kv_heads, form) in rows.items()
    }
    # The source reads its larger K and V projections too, each weight once per token in fp16.
    compared["source"] += _WEIGHT_BYTES * parameters_saved(source_shape, groups)
    kv_tiles = [tile for tile in function.tiles if tile.of_kv]
    return ExportFigures(
        context=shape["context"],
        operations=function.histogram.total(),
        kv_tiles=len(kv_tiles),
        kv_tile_bytes=sum(tile.nbytes for tile in kv_tiles),
        bytes_per_token=asdict(traffic) | {"total": traffic.total},
        compared={
            name: Compared(
                num_key_value_heads=rows[name][0],
                kv_tiles=_num_tiles(shape, *rows[name]),
                bytes_per_token=count,
                tokens_per_second=tokens_per_second(count),
            )
            for name, count in compared.items()
        },
        bandwidth=BANDWIDTH,
    )


def _num_tiles(shape: dict[str, int], num_key_value_heads: int, form: AttentionForm) -> int:
    """Copies of K and of V in all layers, where there is anything to copy."""
    grouped = num_key_value_heads < shape["num_attention_heads"]
    return 2 * shape["num_layers"] * form.copies if grouped else 0


def _bytes_at(
    without_cache: int, shape: dict[str, int], num_key_value_heads: int, form: AttentionForm
) -> int:
    arguments = shape | {"num_key_value_heads": num_key_value_heads}
    return closed_form_bytes(without_cache, copies=form.copies, **arguments)
