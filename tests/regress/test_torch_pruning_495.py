"""VainF/Torch-Pruning#495, #461 and #455: pruned models that do not load again.

One fresh process loads every family's conversion and generates with and without the cache.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.regress.folders import get_config
from tests.tiny import FAMILIES, convert, tiny_checkpoint
from upcycle.families import shape_of

CHILD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

settings = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), (folder, info)
    ids = AutoTokenizer.from_pretrained(folder)("abc def", return_tensors="pt").input_ids
    with_cache = model.generate(ids, use_cache=True, **settings)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **settings)), folder
    print(folder)
"""


@pytest.mark.slow
def test_every_family_loads_and_generates_in_a_fresh_process(tmp_path: Path) -> None:
    folders = []
    for name in FAMILIES:
        source = tiny_checkpoint(tmp_path / "sources" / name, name)
        valid = shape_of(get_config(source)).valid_kv_heads
        convert(source, tmp_path / name, kv_heads=2 if 2 in valid else 1)
        folders.append(str(tmp_path / name))
    command = [sys.executable, "-c", CHILD, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == folders
