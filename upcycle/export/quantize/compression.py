"""Compress the constants of a converted function through coremltools' own passes."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from upcycle.errors import ExportError
from upcycle.export.quantize.palette import fit_palette
from upcycle.export.quantize.schemes import Scheme
from upcycle.export.quantize.weights import WeightMatrix
from upcycle.export.quiet import quiet_coremltools

# A constant is named after the decoder's parameter, whose path begins with the decoder's `model`.
# Between module and parameter there may be what the export put there; what follows depends on the
# dtype that the parameter was traced in.
_NAME = "model_{}(_embedding|_parts_[0-9]+)?_{}(_to_fp16|_promoted_to_fp16)?"
# What coremltools makes of a constant: what it puts behind the name, and the operation.
_MADE = {
    "palette": ("_palettized", "constexpr_lut_to_dense"),
    "linear": ("_quantized", "constexpr_blockwise_shift_scale"),
}


def compress(model: Any, weights: Mapping[str, WeightMatrix], schemes: Mapping[str, Scheme]) -> Any:
    """One converted function with its weights compressed.

    Each function of a package is compressed on its own, then they are joined: the same weights
    give the same bytes.

    Args:
        model: a `coremltools.models.MLModel` with one function.
        weights: of `find_weights`, by name.
        schemes: of `assign`, with those of a split head of `split_palettes`.

    Raises:
        ExportError: the program has no constant of a weight's name, or it stayed as it was.
    """
    model = _split_tied(model, weights)
    constants = _constants(model)
    chosen = {
        name: (weights[weight], scheme, rank)
        for weight, scheme in schemes.items()
        for name, rank in _constants_of(weights[weight], scheme, constants).items()
    }
    with quiet_coremltools():
        import coremltools.optimize.coreml as optimize

        passes: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "palette": (optimize.palettize_weights, _palettizer),
            "linear": (optimize.linear_quantize_weights, _quantizer),
        }
        for kind, (run, config_for) in passes.items():
            configs = {
                name: config_for(weight, scheme, rank)
                for name, (weight, scheme, rank) in chosen.items()
                if scheme.kind == kind
            }
            if configs:
                # coremltools ignores names that it does not find and weights that it cannot
                # compress, so the result is checked below.
                model = run(model, optimize.OptimizationConfig(op_name_configs=configs))
    _check(model, {name: scheme for name, (_, scheme, _) in chosen.items()})
    return model


def _palettizer(weight: WeightMatrix, scheme: Scheme, _: int) -> Any:
    import coremltools.optimize.coreml as optimize

    group = 1 if weight.stacked else scheme.group
    return optimize.OpPalettizerConfig(
        mode="custom",
        lut_function=partial(fit_palette, bits=scheme.bits),
        granularity="per_grouped_channel" if group else "per_tensor",
        group_size=group or 0,
        channel_axis=0,
        weight_threshold=0,
    )


def _quantizer(weight: WeightMatrix, scheme: Scheme, rank: int) -> Any:
    import coremltools.optimize.coreml as optimize

    sizes = [1] * (len(weight.shape) - 1) + [scheme.block or 0]
    if weight.transposed:
        sizes[-2:] = sizes[:-3:-1]
    sizes += [0] * (rank - len(sizes))  # a 1x1 convolution is [out, in, 1, 1]
    return optimize.OpLinearQuantizerConfig(
        mode="linear_symmetric",
        dtype=f"int{scheme.bits}",
        granularity="per_block",
        block_size=sizes,
        weight_threshold=0,
    )


def _split_tied(model: Any, weights: Mapping[str, WeightMatrix]) -> Any:
    """Give an untied output matrix its own constant: the converter merges equal ones."""
    outer = {weight.role: weight for weight in weights.values() if weight.layer is None}
    constants = _constants(model)
    if not {"embedding", "lm_head"} <= set(outer) or _named(outer["lm_head"], constants):
        return model
    shared = _named(outer["embedding"], constants)
    if len(shared) != 1:
        return model
    (name,) = shared
    own = _NAME.split("{")[0] + outer["lm_head"].name.replace(".", "_")
    spec = model.get_spec()
    for block in _blocks(spec):
        names = [[output.name for output in op.outputs] for op in block.operations]
        at = names.index([name])
        copy = type(block.operations[at])()
        copy.CopyFrom(block.operations[at])
        copy.outputs[0].name = own
        copy.attributes["name"].immediateValue.tensor.strings.values[:] = [own]
        block.operations.insert(at, copy)
        for op in block.operations:
            if op.type != "gather":
                _rename_operand(op, name, own)
    with quiet_coremltools():
        from coremltools.models import MLModel

        return MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True)


def _rename_operand(op: Any, old: str, new: str) -> None:
    for argument in op.inputs.values():
        for binding in argument.arguments:
            if binding.name == old:
                binding.name = new


def _constants_of(
    weight: WeightMatrix, scheme: Scheme, constants: Mapping[str, int]
) -> dict[str, int]:
    """Names and ranks of the constants that hold a weight: several if the export split it."""
    found = _named(weight, constants)
    if not found:
        raise ExportError(
            f"the converted program has no constant of {weight.name}",
            where=f"--quantize, which would store it as {scheme}",
            fix="leave its role out of a YAML file given to --quantize",
        )
    return found


def _named(weight: WeightMatrix, constants: Mapping[str, int]) -> dict[str, int]:
    paths = [path.rpartition(".") for path in (weight.name, *weight.aliases)]
    forms = [re.compile(_NAME.format(owner.replace(".", "_"), leaf)) for owner, _, leaf in paths]
    return {
        name: rank
        for name, rank in constants.items()
        if any(form.fullmatch(name) for form in forms)
    }


def _check(model: Any, schemes: Mapping[str, Scheme]) -> None:
    """Every constant must be gone, and a compressed one stand for it."""
    made = {output.name: op.type for op in _operations(model) for output in op.outputs}
    for name, scheme in schemes.items():
        end, kind = _MADE[scheme.kind]
        if name in made or made.get(name + end) != kind:
            raise ExportError(
                f"coremltools left a weight as it was instead of storing it as {scheme}",
                where=name,
                fix="give its role another scheme in a YAML file given to --quantize",
            )


def _constants(model: Any) -> dict[str, int]:
    """Rank of every constant by its name."""
    return {
        op.outputs[0].name: op.outputs[0].type.tensorType.rank
        for op in _operations(model)
        if op.type == "const"
    }


def _blocks(spec: Any) -> Iterator[Any]:
    for function in spec.mlProgram.functions.values():
        yield from function.block_specializations.values()


def _operations(model: Any) -> list[Any]:
    return [op for block in _blocks(model.get_spec()) for op in block.operations]
