"""The third stage: how the converted and the uptrained checkpoint compare with the source."""

from typing import Any

from upcycle.checkpoint.staging import staged
from upcycle.options.evaluate import EvaluateOptions
from upcycle.pipeline.stage import Cost, Note, Precondition, Stage
from upcycle.progress import Watcher
from upcycle.utf8 import to_json


class Evaluate(Stage):
    """Compare the checkpoints on held-out text."""

    name = "evaluate"
    needs = ("convert", "train")
    asked: EvaluateOptions

    def preconditions(self) -> list[Precondition]:
        """The held-out text, and the device."""
        return [Precondition("evaluation text", Cost.TEXT, self._check_text)]

    def _check_text(self) -> str:
        from upcycle.evaluation.held_out import read_held_out
        from upcycle.models.loading import choose_device, load_tokenizer

        choose_device(self.asked.device)
        text = read_held_out(self.asked, load_tokenizer(self.run.source)).text
        losses = f"; not all of the text is used: {text.losses}" if text.losses else ""
        return f"{text.windows} windows, {text.tokens:,} tokens to score{losses}"

    def inputs(self) -> dict[str, Any]:
        """All models and the text."""
        text = [self.run.content(path) for path in self.asked.text]
        return {**self.run.models(), "text": text}

    def make(self, watch: Watcher, note: Note) -> None:
        """Compare."""
        from upcycle.evaluation.compare import evaluate

        run = self.run
        made = evaluate(run.source, run.candidates, self.asked, watch=watch)
        text = to_json(made.to_dict(), indent=2) + "\n"
        with staged(self.output, overwrite=True) as folder:
            (folder / run.layout.comparison.name).write_text(text, encoding="utf-8")
            self.write_manifest(folder)
