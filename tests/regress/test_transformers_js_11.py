"""xenova/transformers.js#11: tokenizer and template files lost or rewritten on the way.

Also hiyouga/LlamaFactory#8399, QwenLM/Qwen3-VL#1488, huggingface/text-generation-inference#3247 and
SYSTRAN/faster-whisper#464.
"""

from pathlib import Path

from tests.tiny import convert, tiny_checkpoint

FILES = {
    "tokenizer.model": bytes(range(256)),
    "chat_template.jinja": b"{% for m in messages %}{{ m }}\r\n{% endfor %}",
    "tokenizer_config.json": b'{"chat_template": "other", "unknown": 1.0e0}',
    "helper.py": b"print('kept, never run')\n",
    "LICENSE": "Lizenz für alle\n".encode("latin-1"),
    "vocab/extra.txt": b"",
}


def test_files_beside_the_weights_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    for name, data in FILES.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    convert(source, tmp_path / "out", kv_heads=2)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == FILES
    tokenizer = "tokenizer.json"
    assert (tmp_path / "out" / tokenizer).read_bytes() == (source / tokenizer).read_bytes()
