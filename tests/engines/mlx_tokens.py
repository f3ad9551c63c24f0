"""Greedy tokens of folders in mlx-lm, as JSON: run with their packages on the path.

    python mlx_tokens.py LENGTH PROMPTS FOLDER...

PROMPTS is a JSON list of lists of ids. Writes a list with, for each folder, the new ids of each
prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """The ids that follow, with mlx-lm's own cache."""
    cache = make_prompt_cache(model)
    found: list[int] = []
    ids = mx.array([prompt])
    for _ in range(length):
        token = int(mx.argmax(model(ids, cache=cache)[0, -1]).item())
        found.append(token)
        ids = mx.array([[token]])
    return found


def tokens(folder: str, prompts: list[list[int]], length: int) -> list[list[int]]:
    """One folder's tokens in fp32."""
    model, _ = load_model(Path(folder))
    model.update(tree_map(lambda value: value.astype(mx.float32), model.parameters()))
    return [greedy(model, prompt, length) for prompt in prompts]


def main() -> None:
    mx.set_default_device(mx.cpu)
    length, prompts = int(sys.argv[1]), json.loads(sys.argv[2])
    json.dump([tokens(folder, prompts, length) for folder in sys.argv[3:]], sys.stdout)


if __name__ == "__main__":
    main()
