"""A saved program with a read-only cache, called as an app would, with the host's cache."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import tiny_checkpoint, tiny_model
from upcycle.export.coreml import export_coreml
from upcycle.interpreter.interpreter import Interpreter
from upcycle.interpreter.prepare import Loaded
from upcycle.options.export import ExportOptions
from upcycle.program.host_cache import HostCache
from upcycle.program.reading import read_graph

CONTEXT, PREFILL = 32, 8
SETTINGS = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attn_logit_softcapping": 2.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}


@pytest.mark.parametrize("attention", ["qfold", "repeat-kv"])
def test_prefill_and_decode_give_the_models_logits(attention: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "gemma2", **SETTINGS)
    exported = export_coreml(
        source,
        tmp_path / "a.mlpackage",
        ExportOptions(context=CONTEXT, prefill=PREFILL, attention=attention, kv_cache="read-only"),
    )
    for function in exported.functions.values():  # without a concatenation of K or V, by `checks`
        past = [tile for tile in function.tiles if tile.of_kv and CONTEXT in tile.shape]
        assert len(past) == (4 if attention == "repeat-kv" else 0)
        assert not function.states

    tokens = torch.randint(0, 260, (1, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = tiny_model("gemma2", **SETTINGS)(tokens).logits[0]
    interpreter = Interpreter(Loaded(read_graph(exported.package)), half=False)
    cache = HostCache.of(exported.manifest)
    calls = [("prefill", part) for part in tokens[:, : 2 * PREFILL].split(PREFILL, 1)]
    calls += [("main", part) for part in tokens[:, 2 * PREFILL :].split(1, 1)]
    found = []
    for function_name, part in calls:
        given = cache.inputs(part.int().numpy())
        outputs = interpreter.run(
            function_name, {name: torch.from_numpy(value) for name, value in given.items()}
        )
        cache.append({name: value.numpy() for name, value in outputs.items()})
        found.append(outputs["logits"][0].float())
    assert cache.length == 20
    difference = (torch.cat(found) - expected).abs().max()
    assert difference < 5e-3 * (expected.max() - expected.min())
    assert next(iter(cache.past.values())).dtype == np.float16
