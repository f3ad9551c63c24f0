"""What a family declares, and how its tensors become `AttentionWeights` and back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from upcycle.attention import AttentionShape, AttentionWeights, QkNorm, Rope, RopePairing
from upcycle.errors import FamilyError
from upcycle.families.cached import States, Windows
from upcycle.families.class_config import ClassConfig, class_defaults
from upcycle.families.projections import Projections, Role, Separate, by_head
from upcycle.families.qk_norms import NormTensors

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_COUNT = 1 << 20  # a damaged number must not become a loop without end


@dataclass(frozen=True)
class Family:
    """An attention layout and what its layers cache, declared.

    Attributes:
        model_type: the value of `model_type` in `config.json`.
        defaults: what the class assumes for keys that `config.json` leaves out, where
            `class_defaults` does not say: of keys that a class of transformers reads without
            declaring them, and of classes that transformers does not have.
        aliases: other names of keys, which a configuration may have instead.
        projections: where q, k, v and o lie.
        qkv_bias: True, False, or the configuration key that says whether q, k and v have biases.
        output_bias: the same for o.
        qk_norm: where the norm of queries and keys lies, if there is one.
        rope_pairing: how key channels pair up.
        rope_when: the configuration key, and the value that it has where there is a rotation; None
            where there always is.
        rope_clockwise: whether positions turn them by negative angles.
        alibi: True, False, or the configuration key that says whether scores have ALiBi's slopes.
        attention_module: the path of layer `{layer}`'s attention.
        extra_modules: the paths of attentions outside the decoder's layers, by the number that each
            goes by in a plan.
        gate: the tensor of the output gate, if it is one of its own.
        sinks: the tensor of the attention sinks, if there are any.
        multi_query_key: for classes that know H KV heads or one: the key that says which.
        attention_layers: which layers have attention, for classes whose others have none.
        windows: which layers see the latest tokens alone, if any may.
        states: what is kept for each sequence beside keys and values, if anything is.
        latent: whether one latent is cached for all heads, so that there are none to merge.
        refused: configuration keys that, when set, change the attention in a way that cannot be
            converted, each with the reason.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    projections: Projections = field(default_factory=Separate)
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    qk_norm: NormTensors | None = None
    rope_pairing: RopePairing = "half"
    rope_when: tuple[str, Any] | None = None
    rope_clockwise: bool = False
    alibi: bool | str = False
    attention_module: str = "model.layers.{layer}.self_attn"
    extra_modules: Mapping[int, str] = field(default_factory=dict)
    gate: str | None = None
    sinks: str | None = None
    multi_query_key: str | None = None
    attention_layers: "Callable[[Family, Mapping[str, Any]], tuple[int, ...]] | None" = None
    windows: Windows | None = None
    states: States | None = None
    latent: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def setting(self, config: Mapping[str, Any], key: str) -> Any:
        """A configuration value, or the class default where the key is absent."""
        for source in (config, self.defaults, class_defaults(self.model_type)):
            for name in (key, self.aliases.get(key, key)):
                if name in source:
                    return source[name]
        return None

    def shape(self, config: Mapping[str, Any]) -> AttentionShape:
        """The attention's numbers from a raw `config.json`.

        Raises:
            FamilyError: a number is missing, H is no multiple of K, or a refused key is set.
        """
        for key, reason in self.refused.items():
            if self.setting(config, key):
                raise FamilyError(
                    f"{self.model_type} with {key} is not supported: {reason}",
                    where=f"config.json, {key}",
                    fix=f"a {self.model_type} checkpoint without {key} can be converted",
                )
        heads = self.count(config, "num_attention_heads")
        hidden = self.count(config, "hidden_size")
        kv_heads = self._kv_heads(config, heads)
        head_dim = hidden // heads
        if self.setting(config, "head_dim") is not None:
            head_dim = self.count(config, "head_dim")
        layers = tuple(range(self.count(config, "num_hidden_layers")))
        if self.attention_layers is not None:
            layers = self.attention_layers(self, config)
        if not layers:
            raise FamilyError(
                "no layer has attention",
                where="config.json, the kinds of the layers",
                fix="a model without attention has no KV cache to shrink",
            )
        return AttentionShape(
            num_layers=len(layers),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            hidden_size=hidden,
            rope=self._rope(config, head_dim),
            qkv_bias=self._flag(config, self.qkv_bias),
            output_bias=self._flag(config, self.output_bias),
            qk_norm=self._norm(config),
            clip_qkv=self._clip(config),
            multi_query_only=self.multi_query_key is not None,
            layer_indices=layers,
            alibi=self._flag(config, self.alibi),
        )

    def tensor_names(self, layer: int, shape: AttentionShape) -> dict[Role, str]:
        """The checkpoint's tensor name of each role that a layer has."""
        module = self.extra_modules.get(layer) or self.attention_module.format(layer=layer)
        return {role: f"{module}.{role}" for role in self.tensor_shapes(shape)}

    def tensor_shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """The shape of each role's tensor; a role is the name below the attention module."""
        shapes = self.projections.shapes(shape)
        if shape.qk_norm is not None and self.qk_norm is not None:
            shapes |= self.qk_norm.shapes(shape)
        if self.gate is not None:
            rows = shape.num_attention_heads * shape.value_head_dim
            shapes[self.gate] = (rows, shape.hidden_size)
        if self.sinks is not None:
            shapes[self.sinks] = (shape.num_attention_heads,)
        return shapes

    def kv_shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """The shapes of the tensors that would have others with another number of KV heads."""
        shapes = self.tensor_shapes(shape)
        others = [g for g in shape.valid_kv_heads if g != shape.num_key_value_heads]
        if not others:
            return {}
        other = self.tensor_shapes(replace(shape, num_key_value_heads=others[0]))
        return {role: size for role, size in shapes.items() if other.get(role) != size}

    def kv_roles(self, shape: AttentionShape) -> list[Role]:
        """The roles of the tensors that hold keys' or values' weights, weights of k first."""
        modules = tuple(f"{weight.rpartition('.')[0]}." for weight in self.projections.kv_weights())
        if self.qk_norm is not None and self.qk_norm.key is not None:
            modules += (f"{self.qk_norm.key}.",)
        return [role for role in self.tensor_shapes(shape) if role.startswith(modules)]

    def read(self, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> AttentionWeights:
        """A layer's tensors as `AttentionWeights`, as views where the layout allows."""
        fields = self.projections.read(tensors, shape)
        if shape.qk_norm is not None and self.qk_norm is not None:
            fields |= self.qk_norm.read(tensors, shape)
        if self.gate is not None:
            fields["gate"] = by_head(tensors[self.gate], shape.num_attention_heads)
        if self.sinks is not None:
            fields["sinks"] = tensors[self.sinks]
        return AttentionWeights(
            rope=shape.rope,
            qk_norm=shape.qk_norm,
            clip_qkv=shape.clip_qkv,
            alibi=shape.alibi,
            **fields,
        )

    def write(self, weights: AttentionWeights) -> dict[Role, "Tensor"]:
        """`AttentionWeights` as the checkpoint's tensors: the inverse of `read`."""
        tensors = self.projections.write(weights)
        if weights.qk_norm is not None and self.qk_norm is not None:
            tensors |= self.qk_norm.write(weights)
        if self.gate is not None and weights.gate is not None:
            tensors[self.gate] = weights.gate.flatten(0, 1)
        if self.sinks is not None and weights.sinks is not None:
            tensors[self.sinks] = weights.sinks
        return tensors

    def config_edits(self, config: Mapping[str, Any], kv_heads: int) -> dict[str, Any]:
        """The keys of `config.json` that change with the number of KV heads."""
        edits: dict[str, Any] = {"num_key_value_heads": kv_heads}
        if self.multi_query_key is None:
            return edits
        # The class derives the number; where it is written down it must not contradict.
        stated = edits if "num_key_value_heads" in config else {}
        return {self.multi_query_key: kv_heads == 1, **stated}

    def attention_windows(
        self, config: Mapping[str, Any], layers: tuple[int, ...]
    ) -> tuple[int | None, ...]:
        """The window of each of `layers`, in tokens with the newest among them; None for no limit.

        A layer that attends in chunks counts as one with a window of a chunk, its largest reach.

        Args:
            config: a raw `config.json`.
            layers: the layers that have attention.

        Raises:
            FamilyError: a number or a list of the configuration makes no sense.
        """
        if self.windows is None:
            return (None,) * len(layers)
        return self.windows.of_layers(self._class_config(config), layers)

    def state_elements(self, config: Mapping[str, Any], attention_layers: int) -> int:
        """Elements of all states of one sequence; they do not grow with it.

        Args:
            config: a raw `config.json`.
            attention_layers: how many layers have attention.

        Raises:
            FamilyError: a number of the configuration makes no sense.
        """
        if self.states is None:
            return 0
        layers = self.count(config, "num_hidden_layers")
        if not self.states.everywhere:
            layers -= attention_layers
        return layers * self.states.of_layer(self._class_config(config))

    def count(self, config: Mapping[str, Any], key: str) -> int:
        """A positive whole number of the configuration, or the class default.

        Raises:
            FamilyError: it is something else.
        """
        value = self.setting(config, key)
        if type(value) is not int or not 1 <= value <= _LARGEST_COUNT:
            raise FamilyError(
                f"{key} is {value!r}, not a positive whole number that a model can have",
                where=f"config.json, {key} (model_type {self.model_type})",
                fix="one number for all layers; per-layer values cannot be converted",
            )
        return value

    def number(self, config: Mapping[str, Any], key: str) -> float:
        """A non-negative number of the configuration, or the class default.

        Raises:
            FamilyError: it is something else.
        """
        value = self.setting(config, key)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise FamilyError(
                f"{key} is {value!r}, not a number",
                where=f"config.json, {key} (model_type {self.model_type})",
                fix="give the number that the model was made with",
            )
        return float(value)

    def _class_config(self, config: Mapping[str, Any]) -> ClassConfig:
        return ClassConfig(self.model_type, partial(self.setting, config))

    def _kv_heads(self, config: Mapping[str, Any], heads: int) -> int:
        if self.multi_query_key is not None:
            return 1 if self.setting(config, self.multi_query_key) else heads
        if self.setting(config, "num_key_value_heads") is None:
            return heads
        kv_heads = self.count(config, "num_key_value_heads")
        if heads % kv_heads:
            raise FamilyError(
                f"{heads} query heads cannot share {kv_heads} KV heads evenly",
                where="config.json, num_attention_heads and num_key_value_heads",
                fix="num_key_value_heads must divide num_attention_heads",
            )
        return kv_heads

    def _norm(self, config: Mapping[str, Any]) -> QkNorm | None:
        declared = self.qk_norm
        if declared is None or not self._flag(config, declared.when or True):
            return None
        return replace(declared.norm, eps=self.number(config, declared.eps_key))

    def _clip(self, config: Mapping[str, Any]) -> float | None:
        if self.setting(config, "clip_qkv") is None:
            return None
        return self.number(config, "clip_qkv")

    def _flag(self, config: Mapping[str, Any], flag: bool | str) -> bool:
        return bool(self.setting(config, flag)) if isinstance(flag, str) else flag

    def _rope(self, config: Mapping[str, Any], head_dim: int) -> Rope:
        if self.rope_when is not None:
            key, value = self.rope_when
            if self.setting(config, key) != value:
                return Rope("none", 0)
        return Rope(self.rope_pairing, self._rotary_dim(config, head_dim), self.rope_clockwise)

    def _rotary_dim(self, config: Mapping[str, Any], head_dim: int) -> int:
        nested = config.get("rope_parameters")
        if isinstance(nested, Mapping) and nested.get("partial_rotary_factor") is not None:
            return int(head_dim * self.number(nested, "partial_rotary_factor"))
        if self.setting(config, "partial_rotary_factor") is None:
            return head_dim
        return int(head_dim * self.number(config, "partial_rotary_factor"))
