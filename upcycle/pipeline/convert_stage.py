"""The first stage: the source with fewer KV heads."""

import os
from pathlib import Path
from typing import Any

from upcycle.checkpoint.lineage import CONVERT, differences
from upcycle.checkpoint.manifest import MANIFEST_NAME, Manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.conversion.calibration import text_hashes, uses_seed
from upcycle.conversion.class_check import check_class
from upcycle.errors import DataError, OutputError, TrainingError, warn
from upcycle.options.convert import ConvertOptions
from upcycle.pipeline.shared import Run, loaded
from upcycle.pipeline.stage import ANEW, Cost, Found, Note, Precondition, Stage
from upcycle.progress import Watcher
from upcycle.training.state import state_folders


class Convert(Stage):
    """Merge the source's heads."""

    name = CONVERT
    is_exact = True
    asked: ConvertOptions

    def preconditions(self) -> list[Precondition]:
        """What the source is refused for, for all stages."""
        run, source = self.run, self.run.source
        strict = run.strict or self.asked.strict
        return [
            Precondition("inputs and output", Cost.PATHS, lambda: _check_paths(run)),
            Precondition("conversion", Cost.SOURCE, lambda: _check_conversion(run)),
            Precondition("class", Cost.SOURCE, lambda: check_class(source, strict=strict)),
            Precondition("language model", Cost.SOURCE, lambda: _check_language_model(source)),
            Precondition("context", Cost.SOURCE, lambda: _check_positions(run)),
        ]

    def inputs(self) -> dict[str, Any]:
        """What loading the source reads."""
        return {"source": self.run.source_files()}

    def changes(self, manifest: Manifest) -> list[str]:
        """The source or the section differ; any version's conversion is taken."""
        was = loaded(manifest.source.files)
        return [*differences({"source": was}, self.inputs()), *option_changes(manifest, self.asked)]

    def make(self, watch: Watcher, note: Note) -> None:
        """Convert."""
        from upcycle.conversion.convert import convert

        made = convert(self.run.source, self.output, self.asked, overwrite=True, watch=watch)
        for line in made.left_behind_lines:
            note(line)
        for warning in made.plan.warnings:
            warn(warning)

    def refuse_loss(self, found: Found, *, is_own: bool, is_made: bool) -> None:
        """Refuse to make other bytes of what was trained too.

        Raises:
            OutputError: another command made what is there.
            TrainingError: what is there was trained.
        """
        super().refuse_loss(found, is_own=is_own, is_made=is_made)
        # Only a conversion to the same bytes leaves the states what they were of.
        if not (found.changes or MANIFEST_NAME in found.damaged):
            return
        layout = self.run.layout
        trained = [folder.name for folder in state_folders(layout.training)]
        trained += [layout.uptrained.name] if os.path.lexists(layout.uptrained) else []
        if trained:
            raise TrainingError(
                f"{layout.converted} was trained ({', '.join(trained)}) and is no longer what the "
                f"recipe asks for: {found.problem}",
                where=str(layout.output),
                fix=f"{ANEW} convert and train anew",
            )


def option_changes(manifest: Manifest, section: ConvertOptions) -> list[str]:
    """What a section says otherwise than the options that a folder was made by.

    A seed by which nothing is drawn is free.

    Args:
        manifest: of the converted folder.
        section: of the recipe.
    """
    asked, made = section.noted(), section.noted_in(manifest.options.document)
    # Looked up only where it matters: methods load torch.
    if asked["seed"] != made["seed"] and not uses_seed(section):
        del asked["seed"]
    known = {key: value for key, value in made.items() if key in asked}
    read = manifest.source.document.get("text")
    if read is not None and section.calibration:  # content tells more than names
        known["calibration"] = read
        asked["calibration"] = text_hashes(section)
    return differences(known, asked)


def _check_paths(run: Run) -> str:
    """Refuse inputs that are missing, and an output folder that one of them shares.

    Raises:
        DataError: there is no such input.
        OutputError: the output is, lies in or contains one of them.
    """
    recipe, output = run.recipe, run.recipe.output
    inputs = [run.source, *recipe.texts, *run.inputs]
    if recipe.train is not None and recipe.train.teacher is not None:
        teacher = Path(recipe.train.teacher)
        inputs += [teacher] if teacher.is_dir() else []  # else a Hub id, or its own check's matter
    mine = output.resolve()
    for path in inputs:
        theirs = path.resolve()
        if not theirs.exists():
            raise DataError(
                f"there is no {path}", where=str(theirs), fix="name a file or folder that exists"
            )
        if mine.is_relative_to(theirs) or theirs.is_relative_to(mine):
            raise OutputError(
                f"the output {output} and the input {path} must lie outside each other",
                where=str(mine),
                fix="name an output beside the inputs, which are only read",
            )
    return f"{len(inputs)} inputs are there, outside {output}"


def _check_conversion(run: Run) -> str:
    """Refuse what `convert` would refuse.

    Raises:
        UpcycleError: as for `check_request`.
    """
    from upcycle.conversion.convert import check_request

    todo = check_request(run.source, run.recipe.convert)
    heads = f"{todo.source_shape.num_key_value_heads} → {todo.num_key_value_heads} KV heads"
    return "; ".join([heads, *(f"warning: {warning}" for warning in todo.warnings)])


def _check_language_model(source: Path) -> str:
    """Refuse a source that is no causal language model.

    Raises:
        CheckpointError: it is none.
    """
    from upcycle.models.loading import check_causal_lm

    checkpoint = Checkpoint.open(source)
    return check_causal_lm(checkpoint.config, checkpoint.tensors, source)


def _check_positions(run: Run) -> str:
    """Refuse rows, windows and prompts that do not fit into the source's positions.

    Raises:
        EvaluationError: one does not.
    """
    from upcycle.models.comparable import check_context
    from upcycle.models.generation import prompt_tokens
    from upcycle.models.loading import class_config, load_tokenizer

    recipe, source = run.recipe, run.source
    config = class_config(Checkpoint.open(source).config).get_text_config()
    evaluated = recipe.evaluate
    lengths = {"evaluate.sequence_length": evaluated.sequence_length}
    if recipe.train is not None:
        lengths["train.sequence_length"] = recipe.train.sequence_length
    if recipe.export is not None:
        lengths["export.context"] = recipe.export.context
    for key, length in lengths.items():
        check_context(config, length, source, key=key)
    if evaluated.prompts:
        tokenizer = load_tokenizer(source)
        for prompt in evaluated.prompts:
            prompt_tokens(tokenizer, prompt, evaluated.new_tokens, config)
    return ", ".join(f"{key} {length}" for key, length in lengths.items())
