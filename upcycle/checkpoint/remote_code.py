"""Models that only their own repository's code can run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upcycle.checkpoint.reader import CONFIG_FILE
from upcycle.errors import FamilyError


def refuse_remote_code(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a configuration that names code for the model in `auto_map`.

    That code says what the weights mean, and it is never run here: the layout that the model type
    has in transformers may be another. Code for a tokenizer alone is none of our business.

    Raises:
        FamilyError: there is such code.
    """
    auto_map = config.get("auto_map")
    named = auto_map if isinstance(auto_map, Mapping) else {"AutoModel": auto_map}
    code = [
        entry
        for key, entry in named.items()
        if key.startswith(("AutoModel", "AutoConfig")) and entry
    ]
    if code:
        raise FamilyError(
            f"auto_map names remote code for the model ({code[0]}), which is never run here",
            where=f"{folder / CONFIG_FILE}, auto_map",
            fix=f"where transformers' own class for model_type {config.get('model_type')!r} is the "
            "same model, remove auto_map; otherwise save the model with a class of transformers",
        )
