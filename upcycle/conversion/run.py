"""Carry out a plan: stream every shard from source to output, merging attention on the way."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from upcycle.checkpoint.manifest import hash_folder, sha256_file, write_manifest
from upcycle.checkpoint.reader import CONFIG_FILE, INDEX_FILE, Checkpoint
from upcycle.checkpoint.sidecars import copy_sidecars, edit_config
from upcycle.checkpoint.staging import check_output, staged
from upcycle.checkpoint.writer import ShardWriter, tensor_chunks, write_index
from upcycle.conversion.untouched import differing_copies
from upcycle.families import Family, Role, family_of
from upcycle.heads.methods import MergeRequest, get_method
from upcycle.heads.pool import repeat
from upcycle.planning import Attention, Plan, PlannedShard, plan
from upcycle.progress import Progress, Watcher, ignore

if TYPE_CHECKING:
    from torch import Tensor

LIBRARIES = ("torch", "safetensors")


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion did.

    Attributes:
        plan: the plan that was carried out.
        manifest: the content of the output's `upcycle.json`.
        left_behind: weights in other formats that the source folder holds and the output does not.
    """

    plan: Plan
    manifest: Mapping[str, Any]
    left_behind: list[str]


def convert(
    source: str | Path,
    output: str | Path,
    *,
    kv_heads: int,
    method: str = "mean",
    seed: int = 0,
    overwrite: bool = False,
    sha256: bool = False,
    watch: Watcher = ignore,
) -> ConversionResult:
    """Convert a checkpoint to `kv_heads` KV heads.

    The output folder appears whole or not at all. Only attention is decoded; every other tensor
    is copied as bytes and compared after writing, and `config.json` changes in the keys of the
    plan alone.

    Args:
        source: a checkpoint folder, a Hub cache snapshot, or a Hub id.
        output: the folder to make.
        kv_heads: g, see `plan`.
        method: how a group of KV heads becomes one.
        seed: for methods that draw.
        overwrite: replace an existing output.
        sha256: also record SHA-256 of the source's weights in the manifest.
        watch: told the bytes written.

    Raises:
        CheckpointError: the source is damaged or contradicts itself.
        FamilyError: the source has no KV heads that can be merged.
        PlanError: `kv_heads` or `method` is not possible.
        OutputError: the output exists, lies inside the source, or cannot be written.
    """
    output = Path(output)
    checkpoint = Checkpoint.open(source)
    check_output(output, overwrite=overwrite, inputs=[checkpoint.folder])
    get_method(method)
    todo = plan(checkpoint, kv_heads=kv_heads, method=method, seed=seed)
    config = edit_config(
        checkpoint.config_text,
        todo.config_edits,
        after="num_attention_heads",
        where=checkpoint.folder / CONFIG_FILE,
    )
    with staged(output, overwrite=overwrite, inputs=[checkpoint.folder]) as folder:
        stream = _Stream(checkpoint, todo, watch)
        for shard in todo.shards:
            stream.write(shard, folder)
        if (checkpoint.folder / INDEX_FILE).is_file():
            write_index(folder, [shard.layout for shard in todo.shards])
        left_behind = copy_sidecars(checkpoint, folder)
        (folder / CONFIG_FILE).write_bytes(config.encode("utf-8"))
        differing = differing_copies(checkpoint, Checkpoint.open(folder), todo)
        assert not differing, f"copied tensors differ from the source: {differing}"
        manifest = write_manifest(
            folder,
            stage="convert",
            source=_source_record(checkpoint, stream.source_hashes, sha256),
            options={"kv_heads": kv_heads, "method": method, "seed": seed},
            libraries=LIBRARIES,
            result={"files": hash_folder(folder, known=stream.output_hashes)},
        )
    return ConversionResult(todo, manifest, left_behind)


class _Stream:
    """Writes shard after shard, hashing source and output on the way."""

    def __init__(self, checkpoint: Checkpoint, todo: Plan, watch: Watcher) -> None:
        self.source_hashes: dict[str, str] = {}
        self.output_hashes: dict[str, str] = {}
        self._checkpoint = checkpoint
        self._plan = todo
        self._family = family_of(checkpoint.config)
        self._watch = watch
        self._written = 0
        # One merged layer at a time: a file that scatters a layer makes it again, and costs time
        # but no memory.
        self._layer = -1
        self._tensors: dict[Role, Tensor] = {}

    def write(self, shard: PlannedShard, folder: Path) -> None:
        source_digest = xxhash.xxh3_128()
        source_digest.update(self._source_head(shard.name))
        writer = ShardWriter(folder, shard.layout)
        try:
            for operation in shard.operations:
                name = operation.output.name
                if isinstance(operation, Attention):
                    for chunk in self._checkpoint.chunks(name):
                        source_digest.update(chunk)
                    merged = self._merged(operation.layer, operation.role)
                    writer.write(name, tensor_chunks(merged, operation.output.dtype))
                else:
                    writer.write(name, self._hashed(name, source_digest))
                self._written += operation.output.nbytes
                self._watch(
                    Progress("convert", self._written, self._plan.output_bytes, "B", shard.name)
                )
            self.output_hashes[shard.name] = writer.close()
        finally:
            writer.abandon()
        self.source_hashes[shard.name] = f"xxh3-128:{source_digest.hexdigest()}"

    def _hashed(self, name: str, digest: "xxhash.xxh3_128") -> Iterator[bytes]:
        for chunk in self._checkpoint.chunks(name):
            digest.update(chunk)
            yield chunk

    def _source_head(self, shard: str) -> bytes:
        header = next(h for h in self._checkpoint.headers if h.path.name == shard)
        with header.path.open("rb") as file:
            return file.read(header.data_start)

    def _merged(self, layer: int, role: Role) -> "Tensor":
        if layer != self._layer:
            self._tensors = {}  # before the next layer is read
            self._tensors = merge_layer(self._checkpoint, self._family, self._plan, layer)
            self._layer = layer
        return self._tensors[role]


def merge_layer(
    checkpoint: Checkpoint, family: Family, todo: Plan, layer: int
) -> dict[Role, "Tensor"]:
    """Read one layer's attention, bring it to the plan's number of KV heads, and lay it out."""
    shape = todo.source_shape
    names = family.tensor_names(layer, shape)
    weights = family.read({role: checkpoint.read(name) for role, name in names.items()}, shape)
    if todo.num_key_value_heads > shape.num_key_value_heads:
        return family.write(repeat(weights, todo.num_key_value_heads))
    request = MergeRequest(
        num_key_value_heads=todo.num_key_value_heads,
        layer=layer,
        seed=todo.seed,
        initializer_range=todo.initializer_range,
    )
    return family.write(get_method(todo.method).merge(weights, request))


def _source_record(
    checkpoint: Checkpoint, hashes: Mapping[str, str], sha256: bool
) -> dict[str, Any]:
    """Content hashes of everything that was read, by file name."""
    record: dict[str, Any] = {"files": hash_folder(checkpoint.folder, known=hashes)}
    if sha256:
        record["sha256"] = {name: sha256_file(checkpoint.folder / name) for name in hashes}
    return record
