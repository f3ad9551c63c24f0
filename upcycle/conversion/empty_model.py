"""A model without weights, whose parts are loaded from a checkpoint and dropped again."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig

from upcycle.checkpoint.reader import Checkpoint
from upcycle.errors import CheckpointError
from upcycle.families.lookup import class_prefix
from upcycle.models.loading import class_config, quiet


class EmptyModel:
    """A causal LM of transformers' own class with real buffers and parameters on "meta".

    Attributes:
        model: the module.
        parameters: every name in its state.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: str, attention: str
    ) -> None:
        """Build the class that the checkpoint's configuration names.

        Args:
            checkpoint: where parts come from.
            dtype: of parameters in memory.
            device: where parts are loaded to.
            attention: transformers' name of an attention implementation.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        with quiet(), init_empty_weights(include_buffers=False), no_init_weights():
            self.model: Any = AutoModelForCausalLM.from_config(
                class_config(checkpoint.config),
                dtype=dtype,
                experts_implementation="eager",  # grouped experts have no fp64 kernel
            )
            # A class that cannot keeps the one that it takes by default, as when users load it.
            self.model.set_attn_implementation(attention)
        self.model.eval()
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._loading = LoadStateDictConfig(
            dtype=dtype,
            device_map={"": device},
            weight_mapping=get_model_conversion_mapping(self.model),
        )
        self.parameters = tuple(self.model.state_dict())
        # A class with another head may call the decoder otherwise.
        self._stored_prefix = class_prefix(checkpoint.config) or self.model.base_model_prefix

    def in_memory(self, names: Iterable[str]) -> dict[str, str]:
        """Each name in the files with its name in memory.

        Where several tensors become one (stacked experts), or one becomes several, it is the first
        of the latter.
        """
        mapping = self._loading.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        found = {}
        for stored in names:
            name = self._as_causal(stored)
            key, _ = rename_source_key(name, renamings, converters, prefix, state)
            if key not in state and name in state:
                key, _ = rename_source_key(name, [], [], prefix, state)
            found[stored] = key
        return found

    def _as_causal(self, name: str) -> str:
        """A name in the files as the causal language model's own checkpoints have it."""
        rest = name.removeprefix(f"{self._stored_prefix}.")
        return name if rest == name else f"{self.model.base_model_prefix}.{rest}"

    def load(
        self,
        part: Iterable[str],
        names: Iterable[str],
        replaced: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load parameters, complete or not at all.

        Args:
            part: the parameters, as named in memory.
            names: the tensors they are made from, as named in the files.
            replaced: tensors that stand for the files' own of the same names.

        Raises:
            CheckpointError: tensors of the class are missing or have another shape.
        """
        part, replaced = set(part), replaced or {}
        sources = {self._as_causal(name): self._widened(replaced, name) for name in names}
        with quiet():
            report, _ = convert_and_load_state_dict_in_model(
                self.model, sources, load_config=self._loading
            )
        bad = (report.missing_keys & part) | {name for name, *_ in report.mismatched_keys}
        if bad or report.conversion_errors:
            first = min(bad or report.conversion_errors)
            raise CheckpointError(
                f"{first} of {type(self.model).__name__} is missing or has another shape",
                where=str(self._checkpoint.folder),
                fix="fetch or convert the checkpoint again",
            )

    def _widened(self, replaced: Mapping[str, Tensor], name: str) -> Tensor:
        """A tensor as it is loaded.

        Cast one by one: transformers would hold the whole layer in both dtypes.
        """
        tensor = replaced[name] if name in replaced else self._checkpoint.read(name)
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(torch.promote_types(tensor.dtype, self._dtype))

    def drop(self, part: Iterable[str]) -> None:
        """Free the memory of parameters."""
        for name in part:
            set_module_tensor_to_device(self.model, name, "meta")
