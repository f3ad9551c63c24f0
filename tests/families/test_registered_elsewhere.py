"""A package of one's own adds a family by one row, through the entry-point group."""

import json
import os
import subprocess
import sys
from pathlib import Path

import upcycle
from tests.tiny import tiny_checkpoint

MODULE = """
from upcycle.families import FAMILIES, Family
from upcycle.families.cached import Windows, all_but_last_of

FAMILIES.add("elsewhere")(
    Family(
        "elsewhere",
        {"initializer_range": 0.01},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        windows=Windows(all_but_last_of(2)),
    )
)
FAMILIES.add("elsewhere_latent")(Family("elsewhere_latent", latent=True))
"""
USE = """
import json, sys
from upcycle import plan
from upcycle.families import convertible
from upcycle.kvcache.layout import cache_layout

folder, latent = sys.argv[1], json.loads(sys.argv[2])
made = plan(folder, kv_heads=2)
print(json.dumps({
    "edits": made.config_edits,
    "initializer_range": made.initializer_range,
    "windows": cache_layout(folder).windows,
    "latent": cache_layout(latent).now.elements,
    "convertible": [name for name in convertible() if name.startswith("elsewhere")],
}))
"""
LATENT = {
    "model_type": "elsewhere_latent", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip


def test_a_family_of_another_package_is_planned_and_counted(tmp_path: Path) -> None:
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "elsewhere.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[upcycle.families]\nelsewhere = elsewhere\n")
    folder = tiny_checkpoint(tmp_path / "source", "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["initializer_range"]
    config |= {"model_type": "elsewhere", "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(config))

    paths = os.pathsep.join(map(str, (tmp_path, Path(upcycle.__file__).parents[1])))
    command = [sys.executable, "-c", USE, str(folder), json.dumps(LATENT)]
    environment = {**os.environ, "PYTHONPATH": paths}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == {
        "edits": {"num_key_value_heads": 2},
        "initializer_range": 0.01,
        "windows": [16, None],
        "latent": 20,
        "convertible": ["elsewhere"],
    }
