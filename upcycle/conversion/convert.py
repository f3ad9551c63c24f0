"""Carry out a plan: make a whole converted folder from a source."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from upcycle.checkpoint.files import check_files, chunks_of
from upcycle.checkpoint.manifest import (
    Manifest,
    hash_file,
    hash_folder,
    sha256_file,
    versions,
)
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.checkpoint.remote_code import code_notice
from upcycle.checkpoint.sidecars import copy_sidecars, edit_config
from upcycle.checkpoint.staging import check_output, clear, staged
from upcycle.checkpoint.writer import write_index
from upcycle.conversion.calibration import (
    check_options,
    check_order,
    merge_layers,
    reads_text,
    text_hashes,
    text_rows,
)
from upcycle.conversion.class_check import class_checked
from upcycle.conversion.journal import JOURNAL_NAME, Journal
from upcycle.conversion.layer_store import STORE_NAME, LayerStore, StoredLayers
from upcycle.conversion.merging import LayerMerger, Merger, by_weights_alone
from upcycle.conversion.own_text import (
    OWN_RECORD,
    OWN_TEXT,
    check_memory,
    check_published,
    publish,
    published,
    with_own_text,
)
from upcycle.conversion.shards import ShardWork
from upcycle.conversion.tokenizer import keep_tokenizer
from upcycle.errors import CheckpointError, unsaid
from upcycle.families import family_in
from upcycle.families.extra_attention import old_heads
from upcycle.families.retargets.view import retargeted
from upcycle.heads.methods import get_method
from upcycle.options.convert import ConvertOptions
from upcycle.planning import Plan, plan
from upcycle.progress import Watcher, ignore

LIBRARIES = ("numpy", "safetensors", "scipy", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class ConversionResult:
    """What a conversion did.

    Attributes:
        plan: the plan that was carried out.
        manifest: the output's `upcycle.json`.
        left_behind: weights in other formats, and the model's own code, which the source folder
            holds and the output does not.
        resumed_shards: files that an earlier run had finished.
        warnings: what does not fit transformers' class of the source, see `ClassFit`, and code of
            its own that the source names.
    """

    plan: Plan
    manifest: Manifest
    left_behind: list[str]
    resumed_shards: int
    warnings: list[str]

    @property
    def left_behind_lines(self) -> list[str]:
        """What was left behind and why, for people."""
        code, weights = "the output names no code", "it may hold weights in another form"
        return [
            f"left behind, since {code if name.endswith('.py') else weights}: {name}"
            for name in self.left_behind
        ]


def convert(
    source: str | Path,
    output: str | Path,
    options: ConvertOptions,
    *,
    overwrite: bool = False,
    resume: bool = False,
    watch: Watcher = ignore,
) -> ConversionResult:
    """Convert a checkpoint to another number of KV heads.

    The output folder appears whole or not at all. Only attention is decoded; every other tensor
    is copied as bytes and compared after writing, and `config.json` changes in the keys of the
    plan alone. Attention outside the decoder's layers, such as multi-token prediction, is merged
    like one of them, by its weights alone where the method needs text.

    Args:
        source: a checkpoint folder, a Hub cache snapshot, or a Hub id.
        output: the folder to make.
        options: how heads are merged, and how the result is stored.
        overwrite: replace an existing output.
        resume: take over the files that an interrupted run of the same conversion finished, once
            they and their sources are hashed again; what this run finishes stays if it fails.
        watch: told the bytes that are done, from any thread, one call at a time.

    Raises:
        CheckpointError: the source is damaged or contradicts itself, or what is to be merged is
            not finite.
        FamilyError: the source has no KV heads that can be merged.
        DeviceError: this machine lacks the device.
        PlanError: `kv_heads`, `method`, `dtype` or `max_shard_size` is not possible, or something
            needs calibration text and there is none.
        DataError: the text cannot be read, or there is too little of it.
        OutputError: the output exists, lies inside the source, or cannot be written; or the run to
            resume was of another conversion.
        StrictError: the class has not these names and shapes, or there is code, and `strict`.
    """
    output = Path(output)
    opened = Checkpoint.open(source)
    check_output(output, overwrite=overwrite, inputs=[opened.folder])
    check_files(opened.folder)
    check_options(options)
    if options.own_text:
        check_published(output, overwrite=overwrite)
    with unsaid(code_notice(opened.config) if options.strict else None):
        checkpoint, todo = _planned(opened, options)
    config = edit_config(
        checkpoint.config_text,
        todo.config_edits,
        after="num_attention_heads",
        where=checkpoint.folder / CONFIG_FILE,
        removed=todo.config_removed,
    )
    with (
        class_checked(checkpoint, strict=options.strict, slow=bool(options.calibration)) as check,
        staged(output, overwrite=overwrite, inputs=[opened.folder], resume=resume) as folder,
    ):
        rows, reading, own = None, options, None
        if reads_text(options, todo):
            if options.own_text:
                asked = _request(opened, todo, options.noted())
                reading, own = with_own_text(
                    options, opened, folder, resume=resume, request=asked, watch=watch
                )
            rows = text_rows(reading, checkpoint)
        texts = {} if rows is None else {"text": text_hashes(options)}
        read = {} if rows is None else {"calibration": _digest(rows.numpy().tobytes())}
        request = _request(opened, todo, {**options.noted(), **read})
        journal = Journal(folder, request, resume=resume)
        kept = {JOURNAL_NAME, STORE_NAME, *((OWN_TEXT, OWN_RECORD) if own else ())}
        clear(folder, keep={*kept, *journal.finished})
        merger: Merger = LayerMerger(checkpoint, todo, allow_nonfinite=options.allow_nonfinite)
        layers: list[dict[str, Any]] = []
        if rows is not None:
            weights = {h.path.name: hash_file(h.path) for h in opened.headers}
            store = LayerStore(folder, weights)
            layers = merge_layers(reading, checkpoint, todo, rows, store, watch)
            merger = StoredLayers(store, checkpoint, todo)
        work = ShardWork(checkpoint, todo, folder, journal, merger, watch=watch)
        work.run()
        if rows is not None and work.source_hashes != weights:
            raise CheckpointError(
                "the weights changed while they were calibrated",
                where=str(opened.folder),
                fix="keep the source unchanged during a conversion, and convert it again",
            )
        if todo.has_index:
            write_index(folder, [shard.layout for shard in todo.shards])
        left_behind = copy_sidecars(opened, folder)
        (folder / CONFIG_FILE).write_bytes(config.encode("utf-8"))
        if checkpoint is not opened:
            keep_tokenizer(opened.folder, folder)
        written = Checkpoint.open(folder)  # whole: index and files agree
        left = old_heads(written, family_in(checkpoint), todo.source_shape, todo.target_shape)
        assert not left, f"{left[0]} keeps the old number of KV heads"
        warnings = check.finish()
        told: dict[str, Any] = (
            {"warnings": warnings, "class": asdict(check.fit)} if warnings else {}
        )
        if own:
            hashed = hash_file(folder / OWN_TEXT)
            told["own_text"] = {"file": published(output).name, "hash": hashed, **own}
        manifest = Manifest.of(
            stage="convert",
            source={**_source_record(opened, work.source_hashes, options.sha256), **read, **texts},
            options=options.noted(),
            libraries=LIBRARIES,
            result={
                "files": hash_folder(folder, known=work.output_hashes),
                "method_reference": get_method(todo.method).reference,
                "layers": layers,
                "extra_attention": _extra_record(todo),
                **told,
            },
        ).write(folder)
        clear(folder, only={JOURNAL_NAME, STORE_NAME, OWN_RECORD})
        if own:
            publish(folder, output)
    return ConversionResult(todo, manifest, left_behind, work.resumed, warnings)


def check_request(source: str | Path, options: ConvertOptions) -> Plan:
    """Refuse what `convert` would refuse, but for what it finds in weights and text.

    Returns:
        What would be done.

    Raises:
        CheckpointError: the source is damaged or contradicts itself.
        FamilyError: the source has no KV heads that can be merged.
        DeviceError: this machine lacks the device.
        PlanError: an option is not possible, or there is no text where it is needed.
    """
    opened = Checkpoint.describe(source)
    check_files(opened.folder)
    check_options(options)
    return _planned(opened, options)[1]


def _planned(opened: Checkpoint, options: ConvertOptions) -> tuple[Checkpoint, Plan]:
    """The source as the class that the output has, and what is done to it."""
    checkpoint = retargeted(opened, options.dtype)
    todo = plan(
        checkpoint,
        kv_heads=options.kv_heads,
        method=options.method_name,
        seed=options.seed,
        max_shard_size=options.max_shard_size,
        drop_extra_attention=options.drop_extra_attention,
    )
    check_order(options, todo)
    if options.own_text and reads_text(options, todo):
        check_memory(opened, options.device)
    return checkpoint, todo


def extra_method(todo: Plan) -> str:
    """What becomes of attention outside the decoder's layers that is kept."""
    now = todo.source_shape.num_key_value_heads
    if todo.num_key_value_heads >= now:
        return "copy" if todo.num_key_value_heads == now else "repeat"
    return by_weights_alone(todo).method


def _extra_record(todo: Plan) -> list[dict[str, Any]]:
    """What became of each attention outside the decoder's layers."""
    done = extra_method(todo)
    made = [*((extra, done) for extra in todo.extra), *((extra, "drop") for extra in todo.dropped)]
    return [{"module": e.module, "layer": e.layer, "method": method} for e, method in made]


def _request(checkpoint: Checkpoint, todo: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that shapes the bytes of the shards, but the source's data, by part."""
    headers = {
        f"header of {header.path.name}": _digest(*chunks_of(header.path, 0, header.data_start))
        for header in checkpoint.headers
    }
    return {
        **{f"option {name}": value for name, value in options.items()},
        **{f"version of {name}": value for name, value in versions(LIBRARIES).items()},
        CONFIG_FILE: _digest(checkpoint.config_text.encode()),
        **headers,
        "plan": _digest(repr(todo).encode()),
    }


def _digest(*data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(data))


def _source_record(
    checkpoint: Checkpoint, hashes: Mapping[str, str], sha256: bool
) -> dict[str, Any]:
    """Content hashes of everything that was read, by file name."""
    record: dict[str, Any] = {"files": hash_folder(checkpoint.folder, known=hashes)}
    if sha256:
        record["sha256"] = {name: sha256_file(checkpoint.folder / name) for name in hashes}
    return record
