"""Which test covers each report about conversion, checkpoints, families and serving.

Reports of the same mistake share a row; the file's own docstring cites them all.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

COVERED = {
    "C1": ("NVIDIA/Megatron-LM#480", "regress/test_megatron_lm_480.py"),
    "C2": ("huggingface/transformers#28425", "regress/test_transformers_28425.py"),
    "C3": ("meta-llama/llama#427", "regress/test_llama_427.py"),
    "C4": ("QwenLM/Qwen3#862", "regress/test_qwen3_862.py"),
    "C5": ("LostRuins/koboldcpp#724", "regress/test_koboldcpp_724.py"),
    "C6": ("meta-llama/llama-models#246", "regress/test_llama_models_246.py"),
    "C7": ("fxmeng/TransMLA#18", "regress/test_transmla_18.py"),
    "C8": ("VainF/Torch-Pruning#495", "regress/test_torch_pruning_495.py"),
    "C9": ("aim-uofa/LoRAPrune#6", "regress/test_loraprune_6.py"),
    "C11": ("huggingface/transformers#48643", "regress/test_transformers_48643.py"),
    "C12": ("paiml/entrenar#262", "regress/test_entrenar_262.py"),
    "C13": ("huggingface/trl#6268", "regress/test_trl_6268.py"),
    "C14": ("vllm-project/vllm#24859", "regress/test_vllm_24859.py"),
    "C15": ("lablup/mlxcel#928", "regress/test_mlxcel_928.py"),
    "C16": ("vllm-project/vllm#53114", "regress/test_vllm_53114.py"),
    "C17": ("NVIDIA-NeMo/RL#2802", "regress/test_nemo_rl_2802.py"),
    "C18": ("vllm-project/vllm#2527", "regress/test_vllm_2527.py"),
    "C19": ("ml-explore/mlx-examples#790", "regress/test_mlx_examples_790.py"),
    "C20": ("huggingface/transformers#28163", "regress/test_transformers_28163.py"),
    "C21": ("vllm-project/vllm#13686", "regress/test_vllm_13686.py"),
    "C22": ("ggml-org/llama.cpp#3364", "regress/test_llama_cpp_3364.py"),
    "C23": ("apple/axlearn#842", "regress/test_axlearn_842.py"),
    "C24": ("ggml-org/llama.cpp#21385", "regress/test_llama_cpp_21385.py"),
    "C25": ("arcee-ai/mergekit#316", "regress/test_mergekit_316.py"),
    "C26": ("intel/ipex-llm#11432", "regress/test_ipex_llm_11432.py"),
    "C27": ("huggingface/huggingface_hub#4725", "regress/test_huggingface_hub_4725.py"),
    "C28": ("PersuGPT#2", "regress/test_persugpt_2.py"),
    "C29": ("safetensors/safetensors#98", "regress/test_safetensors_98.py"),
    "C30": ("huggingface/transformers#37785", "regress/test_transformers_37785.py"),
    "C31": ("AI-Hypercomputer/maxtext#4071", "regress/test_maxtext_4071.py"),
    "C32": ("xenova/transformers.js#11", "regress/test_transformers_js_11.py"),
    "C33": ("huggingface/transformers#48307", "regress/test_transformers_48307.py"),
    "C34": ("vllm-project/vllm#1640", "regress/test_transformers_48307.py"),
    "C35": ("vllm-project/vllm#2652", "regress/test_vllm_2652.py"),
    "C37": ("huggingface/optimum-onnx#97", "regress/test_optimum_onnx_97.py"),
    "C38": ("NVIDIA/FasterTransformer#603", "regress/test_fastertransformer_603.py"),
}
DOES_NOT_APPLY = {
    "C10": (
        "NVIDIA/Model-Optimizer#690",
        "another tool dropped the pruning of KV groups: a feature it lacks, with no input to try",
    ),
    "C36": (
        "huggingface/transformers#46960",
        "transformers' SDPA is slow for some shapes, whatever weights a conversion has written",
    ),
}


def test_every_report_has_a_row() -> None:
    assert {*COVERED, *DOES_NOT_APPLY} == {f"C{number}" for number in range(1, 39)}
    assert not set(COVERED) & set(DOES_NOT_APPLY)


@pytest.mark.parametrize("row", COVERED)
def test_the_file_exists_and_cites_its_report(row: str) -> None:
    report, file = COVERED[row]
    text = (TESTS / file).read_text()
    assert report in text.split('"""')[1]
    assert "\ndef test_" in text


def test_what_does_not_apply_has_a_reason() -> None:
    assert all(len(reason) > 40 for _, reason in DOES_NOT_APPLY.values())
