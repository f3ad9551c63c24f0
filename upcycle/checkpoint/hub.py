"""Models by their Hub id, through `huggingface_hub`: whole, or only what describes them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upcycle.checkpoint.foreign import WEIGHT_SUFFIXES
from upcycle.checkpoint.headers import DTYPE_BITS, Header, TensorInfo
from upcycle.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")


def is_hub_id(source: str | Path) -> bool:
    """Whether this may be the id of a model on the Hub."""
    return _HUB_ID.fullmatch(str(source)) is not None


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids to ask the Hub: then only its cache is of use."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch_snapshot(hub_id: str) -> Path:
    """A snapshot in the Hub's cache; weights that would not be read are not fetched.

    Raises:
        CheckpointError: no such model on the Hub, or no way to reach it.
    """
    from huggingface_hub import snapshot_download

    foreign = [f"*{suffix}" for suffix in sorted(WEIGHT_SUFFIXES - {".safetensors"})]
    with _explained(hub_id):
        return Path(
            snapshot_download(hub_id, ignore_patterns=[*foreign, "consolidated*.safetensors"])
        )


def fetch_file(hub_id: str, name: str) -> Path:
    """One file of a model, in the Hub's cache.

    Raises:
        CheckpointError: as for `fetch_snapshot`, or the model has no such file.
    """
    from huggingface_hub import hf_hub_download

    with _explained(hub_id):
        return Path(hf_hub_download(hub_id, name))


def fetch_headers(hub_id: str, folder: Path) -> list[Header]:
    """The headers of a model's safetensors files, a few KB of each.

    Args:
        hub_id: the model.
        folder: where its files would lie.

    Raises:
        CheckpointError: as for `fetch_snapshot`, or the model has no safetensors weights.
    """
    from huggingface_hub import get_safetensors_metadata

    with _explained(hub_id):
        files = get_safetensors_metadata(hub_id).files_metadata
    dtypes = {info.dtype for file in files.values() for info in file.tensors.values()}
    if unknown := sorted(dtypes - set(DTYPE_BITS)):
        raise CheckpointError(
            f"tensors of unknown dtype {', '.join(unknown)}",
            where=hub_id,
            fix="download the model and name its folder, or take another",
        )
    return [
        Header(
            folder / shard,
            0,
            tuple(
                TensorInfo(name, info.dtype, tuple(info.shape), shard, info.data_offsets[0])
                for name, info in file.tensors.items()
            ),
            file.metadata,
        )
        for shard, file in sorted(files.items())
    ]


@contextmanager
def _explained(hub_id: str) -> Iterator[None]:
    """What the Hub refuses, as an error to mend."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
        SafetensorsParsingError,
    )

    not_safetensors = (NotASafetensorsRepoError, SafetensorsParsingError)
    try:
        yield
    except (*not_safetensors, HFValidationError, OSError) as error:  # OSError: all of its others
        fix = "check the spelling, or download the model and name its folder"
        if isinstance(error, GatedRepoError):
            fix = f"accept its terms at https://huggingface.co/{hub_id}, then run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            fix = "check the spelling; for a private model run `hf auth login` first"
        elif isinstance(error, not_safetensors):
            fix = "name a model with safetensors weights"
        raise CheckpointError(
            f"{hub_id} is no folder here, and the Hub did not give it: {type(error).__name__}",
            where=hub_id,
            fix=fix,
        ) from error
