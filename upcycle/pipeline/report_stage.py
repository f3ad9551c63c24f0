"""The last stage: everything that was found, on one page."""

from typing import Any

from upcycle.checkpoint.manifest import MANIFEST_NAME, hash_file
from upcycle.checkpoint.reader import Checkpoint
from upcycle.checkpoint.staging import staged
from upcycle.evaluation.results import Comparison
from upcycle.families import shape_of
from upcycle.pipeline.stage import Note, Stage
from upcycle.progress import Watcher
from upcycle.report.build import build_report
from upcycle.report.render import write_report
from upcycle.report.schema import read_document


class Report(Stage):
    """Write the report."""

    name = "report"
    needs = ("convert", "train", "evaluate", "export")
    asked: str

    def options(self) -> dict[str, Any]:
        """How to make the report again."""
        return {"command": self.asked}

    def inputs(self) -> dict[str, Any]:
        """All models, and what the other stages found."""
        run, log = self.run, self.run.log
        exports = run.recipe.export is not None
        return {
            **run.models(),
            "comparison": hash_file(run.layout.evaluation / MANIFEST_NAME),
            "log": None if log is None else hash_file(log),
            "package": run.content(run.layout.package) if exports else None,
        }

    def make(self, watch: Watcher, note: Note) -> None:
        """Gather and write."""
        run = self.run
        comparison = read_document(Comparison, run.layout.comparison)
        labels = [model.label for model in comparison.models]
        export = None
        if run.recipe.export is not None:
            from upcycle.program.bandwidth import describe_export

            shape = shape_of(Checkpoint.open(run.source).config)
            export = describe_export(shape, run.layout.package)
        document = build_report(
            comparison,
            folders=dict(zip(labels, [run.source, *run.candidates], strict=True)),
            command=self.asked,
            training_log=run.log,
            export=export,
        )
        with staged(self.output, overwrite=True) as folder:
            write_report(document, folder)
            self.write_manifest(folder)
