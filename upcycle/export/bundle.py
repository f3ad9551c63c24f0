"""What an app needs beside the package: tokenizer, chat template, settings, hashes of it all."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from upcycle import stopping
from upcycle.checkpoint.files import chunks_of
from upcycle.checkpoint.manifest import Manifest, hash_folder
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.checkpoint.staging import REFUSALS, staged, staged_entry, sync_tree, writing
from upcycle.program.chunked import bundle_folder

TOKENIZER_FILE = "tokenizer.json"
_TEMPLATE, _TEMPLATE_AS_JSON = "chat_template.jinja", "chat_template.json"
# As they lie in a checkpoint, which is also where transformers and swift-transformers look.
_COPIED = (
    CONFIG_FILE, "generation_config.json", TOKENIZER_FILE, "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", _TEMPLATE, _TEMPLATE_AS_JSON,
)  # fmt: skip


@contextmanager
def staged_bundle(
    package: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[tuple[Path, Path]]:
    """Where to write a package and its folder; both take their names when the block succeeds.

    The package comes last: once it is there, the folder is too.

    Raises:
        OutputError: as for `staged`, for either.
    """
    inputs = list(inputs)
    with (
        ExitStack() as publication,
        staged_entry(package, overwrite=overwrite, inputs=inputs) as entry,
        staged(bundle_folder(package), overwrite=overwrite, inputs=inputs) as folder,
        writing(package, only=REFUSALS),  # a refusal is about the package, not the folder
    ):
        yield entry, folder
        sync_tree(entry.parent)  # what takes long comes before both take their names
        sync_tree(folder)
        publication.enter_context(stopping.shielded())


def write_bundle(
    checkpoint: Checkpoint, folder: Path, *, package: Path | None, manifest: Manifest
) -> None:
    """Copy what a checkpoint has of the tokenizer and its settings, and note what belongs together.

    The folder's manifest has a hash of every file of the folder and of the package.

    Args:
        checkpoint: what was exported.
        folder: where the files go.
        package: the finished package, where it lies outside the folder.
        manifest: what is noted of the export.

    Raises:
        CheckpointError: a file cannot be read.
    """
    for name in _COPIED:
        source = checkpoint.folder / name
        if source.exists():
            with (folder / name).open("wb") as file:
                file.writelines(chunks_of(source))
    template = folder / _TEMPLATE
    if template.exists() and not (folder / _TEMPLATE_AS_JSON).exists():
        # Some releases of swift-transformers read this form alone.
        text = json.dumps({"chat_template": template.read_bytes().decode("utf-8", "replace")})
        (folder / _TEMPLATE_AS_JSON).write_text(text + "\n", encoding="utf-8")
    hashes = {"files": hash_folder(folder)}
    if package is not None:
        hashes["package"] = hash_folder(package)
    Manifest.of(
        stage=manifest.stage,
        source=manifest.source.document,
        options=manifest.options.document,
        libraries=(),
        result={**manifest.result.document, **hashes},
    ).write(folder)
