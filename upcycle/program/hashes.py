"""Whether a package is still the one that its export noted the hashes of."""

from collections.abc import Mapping
from pathlib import Path

from upcycle.checkpoint.manifest import hash_file
from upcycle.errors import ExportError
from upcycle.program.chunked import chunk_paths
from upcycle.program.noted import folder_manifest
from upcycle.program.specification import reading_product


def bundle_folder(package: Path) -> Path:
    """The folder beside `model.mlpackage`: `model-tokenizer`."""
    return package.with_name(f"{package.stem}-tokenizer")


def check_hashes(product: Path) -> None:
    """Refuse a package, or a folder of chunks, of which a file was changed after its export.

    The hashes are in the folder of chunks, or in the one beside a package; a package that lies
    without it is not checked.

    Raises:
        CheckpointError: the folder's manifest cannot be read.
        ExportError: a file is missing or has another hash, or the manifest is damaged.
    """
    product = product.resolve()  # the folder lies beside what a link leads to
    for package in chunk_paths(product):
        for name, noted in sorted(_noted_hashes(product, package).items()):
            path = package / name
            with reading_product(path):
                changed = not path.is_file() or hash_file(path) != noted
            if changed:
                raise ExportError(
                    f"{name} of {package.name} is not the file that `upcycle export` made",
                    where=str(path),
                    fix="export the checkpoint again, or name a package that was changed on "
                    "purpose otherwise than the export",
                )


def _noted_hashes(product: Path, package: Path) -> Mapping[str, str]:
    """The hash of each file of a package, by its path in it."""
    manifest = folder_manifest(bundle_folder(product) if package == product else product)
    if manifest is None:
        return {}
    if package == product:
        return manifest.result.package or {}
    inside = f"{package.name}/"
    return {
        name.removeprefix(inside): noted
        for name, noted in (manifest.result.files or {}).items()
        if name.startswith(inside)
    }
