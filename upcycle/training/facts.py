"""What a run is about: the rows it trains on, and everything a resumed run must share."""

from pathlib import Path
from typing import Any

from upcycle.checkpoint.loading import load_tokenizer
from upcycle.checkpoint.manifest import hash_file
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.data.documents import read_documents
from upcycle.data.ledger import Ledger
from upcycle.data.packing import PackedRows, pack
from upcycle.data.tokens import tokenise_documents
from upcycle.errors import DataError
from upcycle.recipe.schema import TrainRecipe

# What may differ between a run and its resumption: none of it touches the weights.
_FREE_KEYS = {"checkpoint_every", "keep_last", "evaluate_every"}
_HELD_OUT_SHARE, _MOST_HELD_OUT_ROWS = 50, 16


def training_rows(
    tokenizer_folder: Path, recipe: TrainRecipe, ledger: Ledger | None = None
) -> tuple[PackedRows, PackedRows]:
    """Packed rows to train on, and the last few (at most 2 %), which are held out from it.

    Raises:
        DataError: the text cannot be read, or is less than one batch.
    """
    documents = read_documents(
        [source.path for source in recipe.data.sources], recipe.data.text_column, ledger
    )
    tokens = tokenise_documents(
        documents,
        load_tokenizer(tokenizer_folder),
        assistant_only=recipe.data.chat.assistant_only,
    )
    rows = pack(tokens, recipe.sequence_length)
    num_held_out = min(_MOST_HELD_OUT_ROWS, max(1, len(rows) // _HELD_OUT_SHARE))
    num_training = len(rows) - num_held_out
    if num_training < recipe.batch_size:
        raise DataError(
            f"too little text: {len(rows)} rows of {recipe.sequence_length} tokens, of which "
            f"{num_held_out} held out, are less than one batch of {recipe.batch_size}",
            where="recipe, train.data.sources",
            fix="add text, or lower batch_size or sequence_length",
        )
    return rows.part(0, num_training), rows.part(num_training, len(rows))


def run_facts(
    recipe: TrainRecipe, student: Checkpoint, teacher: Checkpoint, rows: PackedRows
) -> dict[str, Any]:
    """Content hashes and options that make two runs the same run, as plain JSON values.

    The rows' hash stands for the text, the tokenizer and the packing; paths stay out.
    """
    settings = recipe.model_dump(mode="json", exclude={"data", *_FREE_KEYS})
    settings["steps"] = recipe.num_steps
    return {
        **{key: value for key, value in settings.items() if value is not None},
        "data": [source.path.name for source in recipe.data.sources],
        "assistant_only": recipe.data.chat.assistant_only,
        "student": _weight_hashes(student),
        "teacher": _weight_hashes(teacher),
        "rows": {"count": len(rows), "hash": rows.content_hash()},
    }


def _weight_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    paths = [checkpoint.folder / CONFIG_FILE, *(header.path for header in checkpoint.headers)]
    return {path.name: hash_file(path) for path in paths}
