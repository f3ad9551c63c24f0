"""An invalid generation_config blocks the final save (huggingface/transformers#29988).

Also haotian-liu/LLaVA#1144 and #1252. The uptrained folder's files are copied, not saved through
transformers, so the weights of a finished run are never lost to it.
"""

import json
from pathlib import Path

from tests.training.runs import tiny_run


def test_the_result_is_written_whatever_the_generation_config(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    text = json.dumps({"temperature": 0.7, "do_sample": False, "eos_token_id": 0})
    for folder in (run.student, run.teacher):
        (folder / "generation_config.json").write_text(text)
    result = run.train(steps=1)
    assert (result.output / "generation_config.json").read_text() == text
    assert (result.output / "model.safetensors").is_file()
