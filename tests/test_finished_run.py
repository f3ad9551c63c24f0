"""A run that has nothing to do says so at once; the list of its stages tells what they are."""

import json
from pathlib import Path
from re import finditer
from typing import Any

import pytest
import yaml

from tests.pipeline_runs import ROOT, TinyPipeline, call, start, tiny_pipeline
from upcycle.pipeline import stages
from upcycle.pipeline.shared import Run
from upcycle.recipe.loading import load_recipe

_COMPARED = {"stage", "makes", "is refused for"}
HEAVY = {"torch", "transformers", "coremltools", "matplotlib", "scipy", "accelerate", "datasets"}


@pytest.fixture
def tiny(tmp_path: Path) -> TinyPipeline:
    """With everything that a finished stage is compared by: texts, a scheme, a teacher."""
    tiny = tiny_pipeline(tmp_path, steps=2, teacher="source")
    document = yaml.safe_load(tiny.recipe.read_text())
    document["convert"] |= {"calibration": ["text.jsonl"], "calibration_tokens": 256}
    document["evaluate"] |= {"prompts": ["ab"], "new_tokens": 4}
    document["export"] = {"context": 32, "quantize": "mixed"}
    tiny.recipe.write_text(yaml.safe_dump(document))
    return tiny


def test_a_finished_run_loads_nothing_heavy(tiny: TinyPipeline) -> None:
    first = call("run", tiny.recipe, "--json")
    assert first.exit_code == 0, first.output
    script = tiny.folder / "again.py"
    script.write_text(f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from upcycle.cli import main
sys.argv = ["upcycle", "run", {str(tiny.recipe)!r}, "--json"]
try:
    main()
except SystemExit as stop:
    print(json.dumps({{"code": stop.code, "loaded": sorted(sys.modules)}}), file=sys.stderr)
""")
    out, err = start(launcher=(str(script),)).communicate(timeout=300)
    told: dict[str, Any] = json.loads(err.splitlines()[-1])
    assert told["code"] == 0
    again = json.loads(out)
    assert again["skipped"] == ["convert", "train", "evaluate", "export", "report"]
    assert again["report"] == json.loads(first.stdout)["report"]
    assert {name.split(".")[0] for name in told["loaded"]} & HEAVY == set()


def test_what_changed_is_refused_as_in_a_first_run(tiny: TinyPipeline) -> None:
    assert call("run", tiny.recipe).exit_code == 0
    empty, other = tiny.folder / "empty.txt", tiny.folder / "other"
    empty.touch()
    refused = call("run", tiny.recipe, f"evaluate.text=[{empty}]")
    first = call("run", tiny.recipe, f"evaluate.text=[{empty}]", f"output={other}")
    assert (refused.exit_code, refused.stderr) == (first.exit_code, first.stderr)
    assert refused.exit_code == 2
    assert not other.exists()


def test_the_table_of_stages_tells_what_they_are(tiny: TinyPipeline) -> None:
    recipe = load_recipe(tiny.recipe)
    assert stages.__doc__ is not None
    head, rule, *lines = stages.__doc__.split("\n\n")[1].splitlines()
    columns = {head[m.start() : m.end()].strip(): slice(*m.span()) for m in finditer("-+", rule)}
    told: dict[str, tuple[str, str]] = {}
    for line in lines:
        name, makes, checks = (line[columns[key]].strip() for key in columns if key in _COMPARED)
        name = name or [*told][-1]
        known = told.get(name, ("", ""))
        told[name] = (f"{known[0]}{makes}", f"{known[1]} {checks}".strip())
    assert told == {
        stage.name: (stage.output.stem, ", ".join(each.name for each in stage.preconditions()))
        for stage in stages.stages_of(Run(recipe, Path(recipe.source)))
    }
