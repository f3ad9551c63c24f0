"""`upcycle.json`: what made a folder, and what shows that it is ours.

The same inputs give the same bytes.
"""

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import xxhash
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from upcycle.errors import CheckpointError
from upcycle.utf8 import shown, strict, to_json
from upcycle.version import __version__

MANIFEST_NAME = "upcycle.json"
SCHEMA = 1


def _texts(value: Any) -> dict[str, str]:
    """What is no object says nothing, and what is no text is another text."""
    return {key: str(item) for key, item in value.items()} if isinstance(value, dict) else {}


Texts = Annotated[dict[str, str], BeforeValidator(_texts)]
# JSON has null where a number is not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


def _or_nothing(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        return None


T = TypeVar("T")
Told = Annotated[T | None, WrapValidator(_or_nothing)]  # what is of another kind tells nothing


class ManifestPart(BaseModel):
    """A part of a manifest, which anyone may have written: what is read of it, and all of it.

    Attributes:
        document: everything that it says, as JSON values.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    document: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return {**value, "document": value} if isinstance(value, dict) else value

    @model_serializer
    def _as_read(self) -> dict[str, Any]:
        return self.document

    def updated(self, **values: Any) -> Self:
        """The same with other values of some keys, as JSON has them."""
        return self.model_validate({**self.document, **values})


class ManifestSource(ManifestPart):
    """What a folder was made from.

    Attributes:
        files: hashes of the source's files, of a conversion.
        origin: hashes of the model that an uptraining goes back to; before they were noted, the
            teacher was always that model.
    """

    files: Texts = {}
    origin: Texts = Field(default={}, validation_alias=AliasChoices("origin", "teacher"))


class ManifestResult(ManifestPart):
    """What a folder holds.

    Attributes:
        files: hashes of its files.
        weights: hashes of an uptraining's weights.
        package: hashes of the files of a package that lies beside the folder.
    """

    files: Texts = {}
    weights: Texts = {}
    package: Texts = {}


class Manifest(ManifestPart):
    """What `upcycle.json` tells of its folder; a part that is missing tells nothing.

    Attributes:
        stage: "convert", "train", "evaluate", "export" or "report".
        source: content hashes of the inputs.
        options: every option that shaped the output, seed included.
        versions: of upcycle, Python and the libraries that matter for the bytes.
        result: facts about the output, such as hashes or counts.
    """

    stage: str
    source: ManifestSource = ManifestSource()
    options: ManifestPart = ManifestPart()
    versions: Texts = {}
    result: ManifestResult = ManifestResult()

    @classmethod
    def of(
        cls,
        *,
        stage: str,
        source: Mapping[str, Any],
        options: Mapping[str, Any],
        libraries: Iterable[str],
        result: Mapping[str, Any],
    ) -> Self:
        """The manifest of one stage. It holds no times, host names or absolute paths.

        Args:
            stage: "convert", "train", "evaluate" or "export".
            source: content hashes of the inputs, by file name.
            options: every option that shaped the output, seed included.
            libraries: packages whose versions matter for the bytes.
            result: facts about the output, such as hashes or counts.
        """
        document = {
            "schema": SCHEMA,
            "stage": stage,
            "source": source,
            "options": options,
            "versions": versions(libraries),
            "result": result,
        }
        return cls.model_validate(strict(document))

    def write(self, folder: Path) -> Self:
        """Write `upcycle.json` into a folder."""
        text = to_json(self.document, indent=2, sort_keys=True) + "\n"
        (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
        return self


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of this package, of Python and of some libraries."""
    return {
        "upcycle": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in sorted(libraries)},
    }


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none.

    Raises:
        CheckpointError: it cannot be read, or a part of it is of another kind.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, type(error).__name__) from error
    if not isinstance(document, dict):
        raise _damaged(path, "it is no JSON object")
    if not isinstance(document.get("stage"), str):
        raise _damaged(path, "stage is missing or no text", "stage")
    for part in ("source", "options", "versions", "result"):
        if not isinstance(document.get(part, {}), dict):
            raise _damaged(path, f"{part} is no JSON object", part)
    return Manifest.model_validate(document)


def _damaged(path: Path, problem: str, key: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{MANIFEST_NAME} is damaged: {problem}",
        where=f"{path}, {key}" if key else str(path),
        fix="make the folder again, or restore the file",
    )


def hash_file(path: Path) -> str:
    """The content hash of one file, as "xxh3-128:<hex>".

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return f"xxh3-128:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"


def hash_path(path: Path) -> str | dict[str, str]:
    """The content hash of a file, or those of every file below a folder."""
    return hash_folder(path) if path.is_dir() else hash_file(path)


def sha256_file(path: Path) -> str:
    """The SHA-256 of one file, in hexadecimal: slower, for those whose policy asks for it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_folder(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Content hash of every visible file below a folder but its manifest, by relative path.

    Paths are as manifests hold them: `shown`, where they are not UTF-8.

    Args:
        folder: what to hash.
        known: hashes that were taken while the files were read or written.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.name == MANIFEST_NAME or any(part.startswith(".") for part in relative.parts):
            continue
        if path.is_file():
            name = relative.as_posix()
            hashes[shown(name)] = (known or {}).get(name) or hash_file(path)
    return hashes


REPORT_NAME = "report.json"
_SPECIFICATION = Path("Data", "com.apple.CoreML", "model.mlmodel")
# A Core ML package notes the manifest in its specification's metadata, a protobuf map: the key, the
# length of the value, the value. What follows that is not text.
_NOTED = re.compile(rb"\n\x07upcycle\x12[\x80-\xff]*[\x00-\x7f](\{.*)", re.DOTALL)
_MOST_BYTES = 1 << 26  # of a file that is read here


def made_here(path: Path) -> bool:
    """Whether a path is an empty folder, or one in which our manifest or report lies.

    The name of a file shows nothing: what stands in it must say that this package wrote it.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            return False
        return not any(path.iterdir()) or any(map(_is_signed, _documents(path)))
    except OSError:  # what cannot be read shows nothing either
        return False


def _documents(folder: Path) -> Iterator[str]:
    """Where a folder may say what made it."""
    # A report of `eval` has no manifest beside it.
    for name in (MANIFEST_NAME, REPORT_NAME, _SPECIFICATION):
        path = folder / name
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            continue
        content = path.read_bytes()
        if name == _SPECIFICATION:
            noted = _NOTED.search(content)
            content = noted[1] if noted else b""
        yield content.decode("utf-8", errors="replace")


class _Signed(ManifestPart):
    """What all documents of ours note: the versions of what made them."""

    versions: Texts


def _is_signed(text: str) -> bool:
    """Whether a text begins with a document of ours."""
    try:
        return "upcycle" in _Signed.model_validate(json.JSONDecoder().raw_decode(text)[0]).versions
    except (ValueError, RecursionError):
        return False
