"""Further-token blocks beside a model that changes its class: dropped when asked, else refused."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.families.retarget_sources import rewrite, source_checkpoint
from tests.predictors import manifest_of, shapes
from upcycle.checkpoint.reader import Checkpoint
from upcycle.cli import convert as _convert  # noqa: F401 - registers the command
from upcycle.cli.app import app
from upcycle.conversion.verify import verify
from upcycle.errors import CheckpointError
from upcycle.kvcache.inspection import inspect_checkpoint
from upcycle.planning import plan

# name of the source: its last layer, where a further one stands
SOURCES = {
    "pythia": ("gpt_neox.layers.2.", "gpt_neox.layers.3."),
    "gpt2": ("transformer.h.2.", "transformer.h.3."),
    "opt": ("model.decoder.layers.2.", "model.decoder.layers.3."),
    "gptj": ("transformer.h.2.", "transformer.h.3."),
    "codegen": ("transformer.h.2.", "transformer.h.3."),
}
NEXT = {"eh_proj.weight": (48, 96), "enorm.weight": (48,)}


def with_block(folder: Path, name: str, block: str, **others: tuple[int, ...]) -> Path:
    """The source with its last layer's tensors once more under `block`."""
    source_checkpoint(folder, name, dtype=torch.float32)
    last = SOURCES[name][0]

    def add(tensors: dict[str, torch.Tensor]) -> None:
        copies = {k: v for k, v in tensors.items() if k.startswith(last)}
        tensors.update({block + k.removeprefix(last): v.clone() for k, v in copies.items()})
        tensors.update({block + k: torch.ones(*shape) for k, shape in others.items()})

    rewrite(folder, add)
    return folder


@pytest.mark.parametrize("name", sorted(SOURCES))
@pytest.mark.parametrize("place", ["mtp.layers.0.", "behind the last", "other.layers.0."])
def test_a_block_is_dropped_when_asked_and_named_when_not(
    tmp_path: Path, name: str, place: str
) -> None:
    behind = place == "behind the last"
    block = SOURCES[name][1] if behind else place
    source = with_block(tmp_path / "source", name, block, **(NEXT if behind else {}))
    for kv_heads in (1, 4):  # also where no head is merged: the new class has no place for it
        with pytest.raises(CheckpointError, match="changes its class") as caught:
            plan(source, kv_heads=kv_heads)
        assert "--drop-extra-attention" in caught.value.fix
    found = inspect_checkpoint(Checkpoint.describe(source)).extra_attention
    assert [module.startswith(block.rstrip(".")) for module in found] == [True]
    out = tmp_path / "out"
    arguments = ["convert", str(source), str(out), "--kv-heads", "1", "--drop-extra-attention"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    count = sum(key.startswith(block) for key in shapes(source))
    top = block.rstrip(".") if behind else block.split(".")[0]
    assert f"dropped {top}: {count} tensors" in result.stdout
    assert [e["method"] for e in manifest_of(out)["result"]["extra_attention"]] == ["drop"]
    plain = source_checkpoint(tmp_path / "plain", name, dtype=torch.float32)
    todo = plan(plain, kv_heads=1)
    assert set(shapes(out)) == {op.output.name for op in todo.operations}


def test_what_is_dropped_does_not_keep_the_proof_from_running(tmp_path: Path) -> None:
    source, out = with_block(tmp_path / "source", "gptj", "mtp.layers.0."), tmp_path / "out"
    arguments = ["convert", str(source), str(out), "--kv-heads", "2", "--drop-extra-attention"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert verify(source, out).passed


@pytest.mark.parametrize("name", ["pythia", "gptj"])
def test_a_further_layer_that_nothing_speaks_of_is_a_wrong_number(
    tmp_path: Path, name: str
) -> None:
    source = with_block(tmp_path / "source", name, SOURCES[name][1])
    with pytest.raises(CheckpointError, match=r"\.3\..* is not part of the model"):
        plan(source, kv_heads=1, drop_extra_attention=True)
