"""Write a plan's files side by side, each proven before it counts as finished."""

import os
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING

from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import sync
from upcycle.checkpoint.writer import ShardWriter, tensor_chunks
from upcycle.conversion.journal import FinishedShard, Journal
from upcycle.conversion.untouched import prove_shard
from upcycle.families.retargets.view import RetargetedCheckpoint, on_disk
from upcycle.planning import Attention, Plan, PlannedShard
from upcycle.progress import Progress, Watcher

if TYPE_CHECKING:
    from torch import Tensor

    from upcycle.conversion.merging import Merger
    from upcycle.families import Role

WORKERS = min(4, os.cpu_count() or 1)  # a disk is not faster with more


class ShardWork:
    """The work on one output folder.

    Args:
        checkpoint: the source.
        todo: what is made of it.
        folder: where the files go; those in the journal may be there already.
        journal: what an earlier run finished; gets what this one finishes.
        merger: makes the tensors of merged attention.
        watch: told the bytes that are done, from any thread, one call at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        todo: Plan,
        folder: Path,
        journal: Journal,
        merger: "Merger",
        *,
        watch: Watcher,
    ) -> None:
        self._checkpoint = checkpoint
        self._disk = on_disk(checkpoint)
        self._plan = todo
        self._folder = folder
        self._journal = journal
        self._watch = watch
        self._merger = merger
        self._hashing: dict[str, Future[str]] = {}
        self._stopped = Event()
        self._progress = Lock()
        self._done = 0
        self.resumed = 0
        self.source_hashes: dict[str, str] = {}
        self.output_hashes: dict[str, str] = {}

    def run(self) -> None:
        """Do everything, or raise what went wrong first; afterwards the hashes are there.

        Raises:
            CheckpointError: the source has become shorter, or a tensor to merge is not finite.
        """
        with ThreadPoolExecutor(WORKERS) as pool:
            shards: list[Future[FinishedShard]] = []
            for shard in self._plan.shards:
                # Before their shard, which waits for them: which in turn waits for nothing.
                for name in self._sources(shard):
                    self._start_hashing(pool, name)
                shards.append(pool.submit(self._finish, shard))
            for header in self._disk.headers:
                self._start_hashing(pool, header.path.name)
            try:
                everything: list[Future[str] | Future[FinishedShard]] = [
                    *self._hashing.values(),
                    *shards,
                ]
                for future in as_completed(everything):
                    finished = future.result()
                    if isinstance(finished, FinishedShard):
                        self._note(finished)
            finally:  # of use where one failed: the others need not go on
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
        self.source_hashes = {name: scan.result() for name, scan in self._hashing.items()}

    def _note(self, shard: FinishedShard) -> None:
        if shard is self._journal.finished.get(shard.name):
            self.resumed += 1
        else:
            self._journal.add(shard)
        # While others are being written; its memory is theirs, for fresh memory costs more than
        # the writing, and a checkpoint would drive everything else out of the cache.
        sync(self._folder / shard.name, keep_cached=False)
        self.output_hashes[shard.name] = shard.digest

    def _start_hashing(self, pool: ThreadPoolExecutor, name: str) -> None:
        if name not in self._hashing:
            header = next(h for h in self._disk.headers if h.path.name == name)
            self._hashing[name] = pool.submit(hash_file, header.path)

    def _finish(self, shard: PlannedShard) -> FinishedShard:
        """Write and prove one file, unless an earlier run did and nothing changed since."""
        before = self._journal.finished.get(shard.name)
        if before is not None and self._is_intact(before, self._sources(shard)):
            self._advance(sum(op.output.nbytes for op in shard.operations), shard.name)
            return before
        written = self._write(shard)
        read = prove_shard(self._checkpoint, self._folder, shard)
        assert read == written, f"{shard.name} reads back differently"
        sources = {name: self._hashing[name].result() for name in self._sources(shard)}
        return FinishedShard(shard.name, written, sources)

    def _is_intact(self, shard: FinishedShard, sources: list[str]) -> bool:
        path = self._folder / shard.name
        return (
            path.is_file()
            and hash_file(path) == shard.digest
            and shard.sources == {name: self._hashing[name].result() for name in sources}
        )

    def _write(self, shard: PlannedShard) -> str:
        # One layer at a time: a file that scatters a layer merges it again, and costs time but
        # no memory.
        layer = -1
        changed: dict[Role, Tensor] = {}
        writer = ShardWriter(self._folder, shard.layout)
        try:
            for operation in shard.operations:
                self._check_stopped()
                output = operation.output
                if isinstance(operation, Attention) and operation.layer != layer:
                    changed = {}  # before the next layer is read
                    changed = self._merger.changed(operation.layer)
                    layer = operation.layer
                if isinstance(operation, Attention) and operation.role in changed:
                    writer.write(output.name, tensor_chunks(changed[operation.role], output.dtype))
                elif isinstance(operation, Attention):
                    writer.write(output.name, self._merger.kept(layer, operation.role))
                else:
                    writer.write(output.name, self._checkpoint.chunks(output.name))
                self._advance(output.nbytes, shard.name)
            return writer.close()
        finally:
            writer.abandon()

    def _sources(self, shard: PlannedShard) -> list[str]:
        """The source files that a shard is made from, in the order of first use."""
        names: dict[str, None] = {}
        for operation in shard.operations:
            if isinstance(operation, Attention):
                names |= dict.fromkeys(self._merger.names(operation.layer))
            else:
                names[operation.output.name] = None
        parts = [part for name in names for part in self._parts(name)]
        return list(dict.fromkeys(self._disk.tensors[part].shard for part in parts))

    def _parts(self, name: str) -> list[str]:
        """The tensors on disk that one of the checkpoint is made from."""
        if isinstance(self._checkpoint, RetargetedCheckpoint):
            return [part.name for part in self._checkpoint.made[name].sources]
        return [name]

    def _advance(self, nbytes: int, shard: str) -> None:
        with self._progress:
            self._done += nbytes
            self._watch(Progress("convert", self._done, self._plan.output_bytes, "B", shard))

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError


class _StoppedError(Exception):
    """Something else went wrong, and is being reported."""
