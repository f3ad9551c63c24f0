"""The folder beside the package."""

import errno
import json
from pathlib import Path

import pytest
from coremltools.proto import Model_pb2
from transformers import AutoTokenizer

from tests.tiny import tiny_checkpoint
from upcycle.checkpoint.manifest import Manifest, hash_file, read_manifest
from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import OutputError
from upcycle.export.bundle import staged_bundle, write_bundle
from upcycle.program.chunked import bundle_folder
from upcycle.program.graph import METADATA_KEY

MANIFEST = Manifest.model_validate(
    {
        "stage": "export",
        "source": {"config.json": "x"},
        "options": {"context": 32},
        "versions": {"upcycle": "0"},
        "result": {"decoder": {}},
    }
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    folder = tiny_checkpoint(tmp_path / "source", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}é")
    (folder / "README.md").write_text("not for the app")
    return Checkpoint.open(folder)


def make(checkpoint: Checkpoint, output: Path, *, overwrite: bool = False) -> Path:
    with staged_bundle(output, overwrite=overwrite, inputs=[checkpoint.folder]) as (entry, folder):
        data = entry / "Data" / "com.apple.CoreML"
        data.mkdir(parents=True)
        (entry / "Manifest.json").write_text("{}")
        (data / "weights.bin").write_bytes(b"1234")
        model = Model_pb2.Model()
        model.description.metadata.userDefined[METADATA_KEY] = json.dumps(MANIFEST.document)
        (data / "model.mlmodel").write_bytes(model.SerializeToString())
        write_bundle(checkpoint, folder, package=entry, manifest=MANIFEST)
    return bundle_folder(output)


def test_the_folder_holds_what_an_app_needs_and_nothing_else(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = make(checkpoint, tmp_path / "model.mlpackage")
    assert folder == tmp_path / "model-tokenizer"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {"tokenizer_config.json", "chat_template.jinja", "upcycle.json"} <= names
    assert not names & {"README.md", "model.safetensors"}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.decode(tokenizer("héllo")["input_ids"]) == "héllo"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hié"


def test_the_template_is_there_as_json_too(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = make(checkpoint, tmp_path / "model.mlpackage")
    template = json.loads((folder / "chat_template.json").read_text())
    assert template == {"chat_template": "{{ messages[0].content }}é"}


def test_the_manifest_names_every_file_of_both(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = make(checkpoint, tmp_path / "model.mlpackage")
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.options.document == {"context": 32}
    result = manifest.result.document
    assert result["decoder"] == {}
    name = "Data/com.apple.CoreML/weights.bin"
    assert result["package"][name] == hash_file(tmp_path / "model.mlpackage" / name)
    assert set(result["files"]) | {"upcycle.json"} == {path.name for path in folder.iterdir()}
    assert result["files"]["tokenizer.json"] == hash_file(folder / "tokenizer.json")


def test_a_failure_leaves_neither(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    monkeypatch.delattr(Manifest, "write")
    with pytest.raises(AttributeError, match="write"):
        make(checkpoint, tmp_path / "model.mlpackage")
    assert sorted(tmp_path.iterdir()) == before


def test_both_are_replaced_only_when_asked(checkpoint: Checkpoint, tmp_path: Path) -> None:
    output = tmp_path / "model.mlpackage"
    folder = make(checkpoint, output)
    with pytest.raises(OutputError, match="exists"):
        make(checkpoint, output)
    (folder / "stale").touch()
    make(checkpoint, output, overwrite=True)
    assert not (folder / "stale").exists()
    specification = output / "Data" / "com.apple.CoreML" / "model.mlmodel"
    content = specification.read_bytes()
    specification.write_bytes(b"of another tool")
    with pytest.raises(OutputError, match="not made by upcycle"):
        make(checkpoint, output, overwrite=True)
    specification.write_bytes(content)
    folder.rename(tmp_path / "kept")
    folder.mkdir()
    (folder / "mine.txt").touch()
    with pytest.raises(OutputError, match="not made by upcycle"):
        make(checkpoint, output, overwrite=True)


def test_a_full_disk_is_told_of_the_package(checkpoint: Checkpoint, tmp_path: Path) -> None:
    output = tmp_path / "model.mlpackage"
    with (
        pytest.raises(OutputError, match=r"cannot write .*model\.mlpackage: No space left"),
        staged_bundle(output),
    ):
        raise OSError(errno.ENOSPC, "full")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_template_that_is_not_utf8_costs_no_export(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (checkpoint.folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    folder = make(checkpoint, tmp_path / "model.mlpackage")
    assert (folder / "chat_template.jinja").read_bytes().endswith(b"\xff")
    stored = json.loads((folder / "chat_template.json").read_bytes())
    assert stored == {"chat_template": "{{ messages }}\N{REPLACEMENT CHARACTER}"}
