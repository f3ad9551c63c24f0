"""What a family declares, and how its tensors become `AttentionWeights` and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from upcycle.attention import AttentionShape, AttentionWeights, Rope, RopePairing
from upcycle.errors import FamilyError

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal[
    "q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "o.weight", "o.bias"
]
_PROJECTIONS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Family:
    """An attention layout with one tensor for each of q, k, v and o.

    Attributes:
        model_type: the value of `model_type` in `config.json`.
        defaults: what the class assumes for keys that `config.json` leaves out.
        qkv_bias: True, False, or the configuration key that says whether q, k and v have biases.
        output_bias: the same for o.
        rope_pairing: how key channels pair up.
        output_name: the module of the output projection.
        attention_module: the path of layer `{layer}`'s attention.
        refused: configuration keys that, when set, change the attention in a way not handled.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    rope_pairing: RopePairing = "half"
    output_name: str = "o_proj"
    attention_module: str = "model.layers.{layer}.self_attn"
    refused: tuple[str, ...] = ()

    def setting(self, config: Mapping[str, Any], key: str) -> Any:
        """A configuration value, or the class default where the key is absent."""
        return config.get(key, self.defaults.get(key))

    def shape(self, config: Mapping[str, Any]) -> AttentionShape:
        """The attention's numbers from a raw `config.json`.

        Raises:
            FamilyError: a number is missing, H is no multiple of K, or a refused key is set.
        """
        for key in self.refused:
            if self.setting(config, key):
                raise FamilyError(
                    f"{self.model_type} with {key} is not supported",
                    where=f"config.json, {key}",
                    fix=f"a {self.model_type} checkpoint without {key} can be converted",
                )
        heads = self._count(config, "num_attention_heads")
        hidden = self._count(config, "hidden_size")
        kv_heads = heads
        if self.setting(config, "num_key_value_heads") is not None:
            kv_heads = self._count(config, "num_key_value_heads")
        if heads % kv_heads:
            raise FamilyError(
                f"{heads} query heads cannot share {kv_heads} KV heads evenly",
                where="config.json, num_attention_heads and num_key_value_heads",
                fix="num_key_value_heads must divide num_attention_heads",
            )
        head_dim = hidden // heads
        if self.setting(config, "head_dim") is not None:
            head_dim = self._count(config, "head_dim")
        return AttentionShape(
            num_layers=self._count(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=head_dim,
            hidden_size=hidden,
            rope=Rope(self.rope_pairing, self._rotary_dim(config, head_dim)),
            qkv_bias=self._flag(config, self.qkv_bias),
            output_bias=self._flag(config, self.output_bias),
        )

    def tensor_names(self, layer: int, shape: AttentionShape) -> dict[Role, str]:
        """The checkpoint's tensor name of each role that a layer has."""
        module = self.attention_module.format(layer=layer)
        modules = {
            "q": f"{module}.q_proj",
            "k": f"{module}.k_proj",
            "v": f"{module}.v_proj",
            "o": f"{module}.{self.output_name}",
        }
        return {role: f"{modules[role[0]]}{role[1:]}" for role in self.tensor_shapes(shape)}

    def tensor_shapes(self, shape: AttentionShape) -> dict[Role, tuple[int, ...]]:
        """The shape of each role's tensor in the checkpoint."""
        rows = {
            "q": shape.num_attention_heads * shape.head_dim,
            "k": shape.num_key_value_heads * shape.head_dim,
            "v": shape.num_key_value_heads * shape.value_head_dim,
            "o": shape.hidden_size,
        }
        columns = dict.fromkeys("qkv", shape.hidden_size)
        columns["o"] = shape.num_attention_heads * shape.value_head_dim
        shapes: dict[Role, tuple[int, ...]] = {}
        for name in _PROJECTIONS:
            shapes[f"{name}.weight"] = (rows[name], columns[name])  # type: ignore[index]
            if shape.output_bias if name == "o" else shape.qkv_bias:
                shapes[f"{name}.bias"] = (rows[name],)  # type: ignore[index]
        return shapes

    def read(self, tensors: Mapping[Role, "Tensor"], shape: AttentionShape) -> AttentionWeights:
        """A layer's tensors as `AttentionWeights`, as views where the layout allows."""
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        output = tensors["o.weight"].reshape(shape.hidden_size, heads, shape.value_head_dim)

        def rows(role: Role, count: int) -> "Tensor | None":
            tensor = tensors.get(role)
            return None if tensor is None else tensor.reshape(count, -1)

        return AttentionWeights(
            q=tensors["q.weight"].reshape(heads, shape.head_dim, shape.hidden_size),
            k=tensors["k.weight"].reshape(kv_heads, shape.head_dim, shape.hidden_size),
            v=tensors["v.weight"].reshape(kv_heads, shape.value_head_dim, shape.hidden_size),
            o=output.permute(1, 0, 2),
            rope=shape.rope,
            q_bias=rows("q.bias", heads),
            k_bias=rows("k.bias", kv_heads),
            v_bias=rows("v.bias", kv_heads),
            o_bias=tensors.get("o.bias"),
        )

    def write(self, weights: AttentionWeights) -> dict[Role, "Tensor"]:
        """`AttentionWeights` as the checkpoint's tensors: the inverse of `read`."""
        tensors: dict[Role, Tensor] = {
            "q.weight": weights.q.flatten(0, 1),
            "k.weight": weights.k.flatten(0, 1),
            "v.weight": weights.v.flatten(0, 1),
            "o.weight": weights.o.permute(1, 0, 2).flatten(1, 2),
        }
        if weights.q_bias is not None and weights.k_bias is not None and weights.v_bias is not None:
            tensors["q.bias"] = weights.q_bias.flatten()
            tensors["k.bias"] = weights.k_bias.flatten()
            tensors["v.bias"] = weights.v_bias.flatten()
        if weights.o_bias is not None:
            tensors["o.bias"] = weights.o_bias
        return tensors

    def config_edits(self, kv_heads: int) -> dict[str, Any]:
        """The keys of `config.json` that change with the number of KV heads."""
        return {"num_key_value_heads": kv_heads}

    def _flag(self, config: Mapping[str, Any], flag: bool | str) -> bool:
        return bool(self.setting(config, flag)) if isinstance(flag, str) else flag

    def _count(self, config: Mapping[str, Any], key: str) -> int:
        value = self.setting(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FamilyError(
                f"{key} is {value!r}, not a positive whole number",
                where=f"config.json, {key} (model_type {self.model_type})",
                fix="one number for all layers; per-layer values cannot be converted",
            )
        return value

    def _rotary_dim(self, config: Mapping[str, Any], head_dim: int) -> int:
        nested = config.get("rope_parameters")
        if isinstance(nested, Mapping) and nested.get("partial_rotary_factor") is not None:
            return int(head_dim * self.number(nested, "partial_rotary_factor"))
        if self.setting(config, "partial_rotary_factor") is None:
            return head_dim
        return int(head_dim * self.number(config, "partial_rotary_factor"))

    def number(self, config: Mapping[str, Any], key: str) -> float:
        """A non-negative number of the configuration, or the class default.

        Raises:
            FamilyError: it is something else.
        """
        value = self.setting(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise FamilyError(
                f"{key} is {value!r}, not a number",
                where=f"config.json, {key} (model_type {self.model_type})",
                fix="give the number that the model was made with",
            )
        return float(value)
