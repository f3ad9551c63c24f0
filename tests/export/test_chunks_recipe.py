"""The size of chunks in a recipe, and a run that exports them."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint
from upcycle.errors import RecipeError
from upcycle.pipeline import run
from upcycle.recipe.loading import load_recipe

RECIPE = """
source: source
output: run
convert: {kv_heads: 2}
evaluate: {text: [text.jsonl], max_tokens: 100, sequence_length: 32}
export: {context: 32, chunk_size: 110KB}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "source")
    rows = [json.dumps({"text": f"row {i} of a small text, {i * i}"}) for i in range(50)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_sizes_are_written_as_people_write_them(recipe: Path) -> None:
    for text, size in (("110KB", 110_000), ("1GiB", 1 << 30), ("5000", 5000)):
        loaded = load_recipe(recipe, [f"export.chunk_size={text}"])
        assert loaded.export is not None
        assert loaded.export.chunk_size == size
    with pytest.raises(RecipeError, match=r"'much' is not a memory size; write it as 80GiB"):
        load_recipe(recipe, ["export.chunk_size=much"])


@pytest.mark.slow
def test_a_run_exports_chunks_and_reports_their_sum(recipe: Path) -> None:
    result = run(load_recipe(recipe), command="upcycle run")
    assert result.package == recipe.parent / "run" / "model"
    names = sorted(path.name for path in result.package.glob("*.mlpackage"))
    assert names == ["chunk1.mlpackage", "chunk2.mlpackage"]
    exported = result.report.export
    assert exported is not None
    assert (exported.context, exported.kv_tiles) == (32, 0)
    assert exported.compared["qfold"].bytes_per_token == exported.bytes_per_token["total"]
    assert run(load_recipe(recipe), command="upcycle run").skipped == (
        "convert",
        "evaluate",
        "export",
        "report",
    )
