"""fxmeng/TransMLA#18, #24 and #42: outputs that need remote code, and runs that do not repeat."""

from pathlib import Path

from tests.regress.folders import get_config, load, logits
from tests.tiny import convert, tiny_checkpoint
from upcycle.checkpoint.manifest import hash_folder, read_manifest


def test_the_output_is_a_plain_checkpoint(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2")
    convert(source, tmp_path / "out", kv_heads=2)
    config = get_config(tmp_path / "out")
    assert "auto_map" not in config
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert not list((tmp_path / "out").glob("*.py"))
    assert logits(load(tmp_path / "out")).isfinite().all()


def test_the_manifest_is_a_recipe_that_gives_the_same_bytes(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "qwen2")
    convert(source, tmp_path / "first", kv_heads=2, method="random", seed=11)
    manifest = read_manifest(tmp_path / "first")
    assert manifest is not None
    options = {key: value for key, value in manifest.options.document.items() if value is not None}
    convert(source, tmp_path / "second", **options)
    assert manifest.source.files == hash_folder(source)
    assert manifest.result.files == hash_folder(tmp_path / "second")
    assert read_manifest(tmp_path / "second") == manifest
