"""Ways in which a checkpoint folder is found damaged; each is drawn from a random generator."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[random.Random, Path], object]

INDEX = "model.safetensors.index.json"
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 1.5, -0.0, 1e308, float("inf"), float("nan"), 2**31, 2**63,
    10**30, "", "x", "4", "../x", "\x00", "\ud800", "\n", [], [1], [[]], {}, {"a": 1}, [None] * 3,
]  # fmt: skip


def weights_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """A safetensors file as its header and its data."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def write_parts(path: Path, header: str, data: bytes) -> None:
    text = header.encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def flip(data: bytes, rng: random.Random, begin: int, end: int) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(begin, end)] = rng.randrange(256)
    return bytes(changed)


def mutated(document: Any, rng: random.Random) -> str:
    """JSON text of a document of which one member is dropped, doubled, renamed or replaced."""
    parents = [document]
    for value in parents:  # grows while it is walked
        children = value.values() if isinstance(value, dict) else value
        parents += [child for child in children if isinstance(child, dict | list) and child]
    parent = rng.choice(parents)
    key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    kind = rng.choice(["drop", "replace", "replace", "replace", "rename", "double", "swap"])
    if kind == "double" and isinstance(parent, dict):
        mark = f"@{rng.random()}"
        parent[mark] = rng.choice([parent[key], *ODD_VALUES])
        return json.dumps(document).replace(json.dumps(mark), json.dumps(key))
    if kind == "drop":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(["", "x", f"{key}_", "\ud800", "../x", "\n"])] = parent.pop(key)
    elif kind == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = rng.choice(ODD_VALUES)
    return json.dumps(document)


def flipped_header(rng: random.Random, folder: Path) -> None:
    path = rng.choice(weights_of(folder))
    data = path.read_bytes()
    path.write_bytes(flip(data, rng, 8, 8 + struct.unpack("<Q", data[:8])[0]))


def flipped_length(rng: random.Random, folder: Path) -> None:
    path = rng.choice(weights_of(folder))
    path.write_bytes(flip(path.read_bytes(), rng, 0, 8))


def flipped_data(rng: random.Random, folder: Path) -> None:
    path = rng.choice(weights_of(folder))
    data = path.read_bytes()
    path.write_bytes(flip(data, rng, 8 + struct.unpack("<Q", data[:8])[0], len(data)))


def flipped_json(rng: random.Random, folder: Path) -> None:
    path = rng.choice([folder / "config.json", *folder.glob(INDEX)])
    data = path.read_bytes()
    path.write_bytes(flip(data, rng, 0, len(data)))


def truncated(rng: random.Random, folder: Path) -> None:
    path = rng.choice([folder / "config.json", *folder.glob(INDEX), *weights_of(folder)])
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, 1, 7, 8, size - 1, rng.randrange(size)]))


def extended(rng: random.Random, folder: Path) -> None:
    path = rng.choice([folder / "config.json", *folder.glob(INDEX), *weights_of(folder)])
    with path.open("ab") as file:
        file.write(rng.choice([b"\x00", b"{}", b"x" * 100, b"}"]))


def mutated_header(rng: random.Random, folder: Path) -> None:
    path = rng.choice(weights_of(folder))
    header, data = read_parts(path)
    write_parts(path, mutated(header, rng), data)


def mutated_config(rng: random.Random, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(mutated(json.loads(path.read_text()), rng))


def mutated_index(rng: random.Random, folder: Path) -> None:
    for path in folder.glob(INDEX):
        path.write_text(mutated(json.loads(path.read_text()), rng))


def odd_attention_number(rng: random.Random, folder: Path) -> None:
    """The keys of the configuration that a conversion depends on."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    keys = [
        "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "model_type",
        "num_hidden_layers", "attention_bias", "quantization_config", "rope_parameters",
        "partial_rotary_factor", "layer_types", "text_config", "initializer_range", "auto_map",
    ]  # fmt: skip
    key = rng.choice(keys)
    config[key] = rng.choice([*ODD_VALUES, 2, 5, 6, 16, 64, 10**12, "gpt_neox", "mamba", "phi3"])
    path.write_text(json.dumps(config))


def leaving_name(rng: random.Random, folder: Path) -> None:
    """An index that names files elsewhere; a single file gets such an index beside it."""
    names = list(load_file(weights_of(folder)[0]))
    path = folder / INDEX
    old = json.loads(path.read_text())["weight_map"] if path.exists() else {}
    odd = [
        "../source/model.safetensors", "/etc/passwd", "..", "", "a\x00b.safetensors",
        "..\\x.safetensors", "./model.safetensors", "\ud800.safetensors", "config.json",
    ]  # fmt: skip
    weight_map = {**dict.fromkeys(names, "model.safetensors"), **old}
    path.write_text(json.dumps({"weight_map": {**weight_map, rng.choice(names): rng.choice(odd)}}))


def retyped_tensor(rng: random.Random, folder: Path) -> None:
    """Another dtype of the same or another size, in the header alone."""
    path = rng.choice(weights_of(folder))
    header, data = read_parts(path)
    entry = rng.choice([entry for name, entry in header.items() if name != "__metadata__"])
    entry["dtype"] = rng.choice(["F16", "BF16", "I32", "U8", "F64", "F4", "f32", "Q8", "C64", ""])
    write_parts(path, json.dumps(header), data)


def reshaped_tensor(rng: random.Random, folder: Path) -> None:
    """Another shape of as many elements, or of others, in the header alone."""
    path = rng.choice(weights_of(folder))
    header, data = read_parts(path)
    entry = rng.choice([entry for name, entry in header.items() if name != "__metadata__"])
    shape, size = entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0]
    entry["shape"] = rng.choice(
        [[size // 4], [2, size // 8], [1, *shape], shape[:-1], [*shape, 2], [0], []]
    )
    write_parts(path, json.dumps(header), data)


def changed_tensors(rng: random.Random, folder: Path) -> None:
    """A sound file whose tensors are not those of the configuration."""
    path = rng.choice(weights_of(folder))
    tensors = load_file(path)
    name = rng.choice([name for name in tensors if "self_attn" in name] or list(tensors))
    tensor = tensors.pop(name)
    kind = rng.choice(["gone", "renamed", "cast", "cut", "extra", "quantised", "layer"])
    changed: dict[str, torch.Tensor] = {
        "gone": {},
        "renamed": {name.replace("weight", "kernel"): tensor},
        "cast": {name: tensor.to(rng.choice([torch.int8, torch.float8_e4m3fn, torch.int64]))},
        "cut": {name: tensor[: tensor.shape[0] // 2].contiguous()},
        "extra": {
            name: tensor,
            name.replace("weight", rng.choice(["bias", "lora_A"])): tensor[0].clone(),
        },
        "quantised": {name.replace("weight", "qweight"): tensor},
        "layer": {name: tensor, name.replace("layers.0", "layers.1"): tensor.clone()},
    }[kind]
    save_file({**tensors, **changed}, path, metadata={"format": "pt"})


def lost_or_swapped_file(rng: random.Random, folder: Path) -> None:
    path = rng.choice([folder / "config.json", *folder.glob(INDEX), *weights_of(folder)])
    other = rng.choice([folder / "config.json", *weights_of(folder)])
    kind = rng.choice(["gone", "swapped", "pickled", "adapter", "copied"])
    if kind == "gone":
        path.unlink()
    elif kind == "swapped":
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "pickled":
        path.rename(folder / "pytorch_model.bin")
    elif kind == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    else:
        path.write_bytes(other.read_bytes())


def odd_file(rng: random.Random, folder: Path) -> None:
    path = rng.choice([folder / "config.json", *folder.glob(INDEX), *weights_of(folder)])
    path.unlink()
    rng.choice(
        [
            os.mkfifo,
            Path.mkdir,
            lambda path: path.symlink_to(path.name),
            lambda path: path.symlink_to("gone"),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to("/proc/self/mem"),
        ]
    )(path)


DAMAGES: list[Damage] = [
    flipped_header, flipped_length, flipped_data, flipped_json, truncated, extended,
    mutated_header, mutated_config, mutated_index, odd_attention_number, leaving_name,
    retyped_tensor, reshaped_tensor, changed_tensors, lost_or_swapped_file, odd_file,
]  # fmt: skip
