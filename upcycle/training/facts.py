"""What a run is about: everything that a resumed run must share, and what may change of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, BaseModel, Field

from upcycle.checkpoint.lineage import is_vocabulary
from upcycle.checkpoint.manifest import ManifestPart, Texts, Told, hash_file, hash_path
from upcycle.checkpoint.reader import CONFIG_FILE, Checkpoint
from upcycle.options.train import TrainOptions
from upcycle.utf8 import shown

if TYPE_CHECKING:
    from upcycle.data.packing import PackedRows

# What may differ between a run and its resumption: none of it touches the weights beyond rounding.
# `steps` stands for fraction and source_steps; text and teacher are told by their hashes.
_NOTED = {name for name in TrainOptions.model_fields if TrainOptions.written(name).noted}
FREE_KEYS = TrainOptions.model_fields.keys() - _NOTED - {"data", "teacher"}
# The keys that `run_settings` has; older runs may have had others.
SETTING_KEYS = _NOTED | {"data", "assistant_only"}
_TOKENIZER_SETTINGS = ("tokenizer_config", "special_tokens_map", "chat_template")


class RowFacts(BaseModel, frozen=True, strict=True):
    """What tells packed rows from others: how many there are, and the hash of all."""

    count: int
    hash: str


class TextFacts(BaseModel, frozen=True, strict=True):
    """What rows are made of, apart from the settings: the same text makes the same rows.

    Other text may, too, so that only the rows decide whether a run is the same.

    Attributes:
        files: hashes of the sources; of a folder those of its files by name.
        column: that holds plain text.
        tokenizer: hashes of the files that make tokens of text, by name.
    """

    files: list[str | dict[str, str]]
    column: str | None
    tokenizer: dict[str, str]


class RunFacts(ManifestPart):
    """Content hashes and options that make two runs the same run; paths stay out.

    Attributes:
        document: all of it as JSON values, in which the settings stand beside what is below.
        student: hashes of its configuration and weights, by file name.
        teacher: the same of the teacher.
        rows: of the training rows: they stand for the text, the tokenizer and the packing.
        text: what the rows were made of.
    """

    student: Texts = Field(default={})
    teacher: Texts = Field(default={})
    rows: Told[RowFacts] = None
    text: Told[TextFacts] = None


class Change(BaseModel, frozen=True, strict=True, serialize_by_alias=True):
    """A fact that differs from some step on.

    Attributes:
        step: optimiser steps done before.
        key: of the fact.
        before: the earlier value.
        after: the value since.
    """

    step: int
    key: str
    before: Any = Field(validation_alias=AliasChoices("from", "before"), serialization_alias="from")
    after: Any = Field(validation_alias=AliasChoices("to", "after"), serialization_alias="to")

    def __str__(self) -> str:
        if isinstance(self.before, dict) or isinstance(self.after, dict):
            return f"other {self.key} after step {self.step}"
        return f"{self.key} {self.before} → {self.after} after step {self.step}"


def run_facts(
    recipe: TrainOptions, student: Checkpoint, teacher: Checkpoint, rows: "PackedRows"
) -> RunFacts:
    """What a run is about."""
    return RunFacts.model_validate(
        {
            **run_settings(recipe),
            "student": weight_hashes(student),
            "teacher": weight_hashes(teacher),
            "rows": row_facts(rows).model_dump(),
            "text": text_facts(recipe, student.folder).model_dump(),
        }
    )


def run_settings(recipe: TrainOptions) -> dict[str, Any]:
    """The part of `run_facts` that the recipe says by itself."""
    return {
        **recipe.noted(),
        "steps": recipe.num_steps,
        "data": [shown(path.name) for path in recipe.texts],
        "assistant_only": recipe.data.chat.assistant_only,
    }


def row_facts(rows: "PackedRows") -> RowFacts:
    """What tells rows from others."""
    return RowFacts(count=len(rows), hash=rows.content_hash())


def text_facts(recipe: TrainOptions, tokenizer_folder: Path) -> TextFacts:
    """What rows are made of, read anew."""
    return TextFacts(
        files=[hash_path(path) for path in recipe.texts],
        column=recipe.data.text_column,
        tokenizer={
            path.name: hash_file(path)
            for path in sorted(tokenizer_folder.iterdir())
            if is_vocabulary(path.name) or path.name.startswith(_TOKENIZER_SETTINGS)
            if path.is_file()
        },
    )


def weight_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Content hashes of a checkpoint's configuration and weights, by file name."""
    paths = [checkpoint.folder / CONFIG_FILE, *(header.path for header in checkpoint.headers)]
    return {path.name: hash_file(path) for path in paths}
