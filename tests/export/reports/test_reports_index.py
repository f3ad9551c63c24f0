"""Which test covers each report about the Core ML export; reports of one mistake share a file."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

COVERED = {
    1: ("apple/coremltools#2633", "test_coremltools_2633.py"),
    2: ("apple/coremltools#2668", "test_coremltools_2668.py"),
    3: ("#2560", "test_coremltools_2668.py"),
    4: ("apple/coremltools#2855", "test_coremltools_2855.py"),
    5: ("Found here", "test_tensor_index_write.py"),
    6: ("apple/coremltools#2713", "test_coremltools_2713.py"),
    7: ("apple/coremltools#2275", "test_coremltools_2275.py"),
    8: ("apple/coremltools#2639", "test_coremltools_2639.py"),
    9: ("pytorch/executorch#15833", "test_executorch_15833.py"),
    10: ("apple/coremltools#2650", "test_coremltools_2650.py"),
    11: ("stablehlo-coreml#89", "test_executorch_15833.py"),
    12: ("stablehlo-coreml#89", "test_executorch_15833.py"),
    13: ("apple/coremltools#2553", "test_coremltools_2553.py"),
    15: ("john-rocky/CoreML-LLM", "test_coreml_llm_states.py"),
    16: ("apple/coremltools#2325", "test_coreml_llm_shift.py"),
    17: ("john-rocky/CoreML-LLM", "test_coreml_llm_shift.py"),
    18: ("apple/coremltools#2500", "test_coremltools_2500.py"),
    19: ("#2548", "test_coremltools_2500.py"),
    20: ("#2600", "test_coremltools_2500.py"),
    21: ("apple/coremltools#2510", "test_coremltools_2510.py"),
    22: ("apple/coreai-models#279", "test_coremltools_2510.py"),
    23: ("apple/coremltools#2669", "test_coremltools_2669.py"),
    24: ("cactus#734", "test_coremltools_2669.py"),
    25: ("huggingface/transformers#39972", "test_transformers_39972.py"),
    26: ("nntrainer#3935", "test_nntrainer_3935.py"),
    27: ("NVIDIA/Megatron-LM#535", "test_megatron_lm_535.py"),
    28: ("maderix/ANE#26", "test_ane_26.py"),
    29: ("apple/coremltools#1807", "test_coremltools_1807.py"),
    31: ("apple/coreai-models#5", "test_coreai_models_5.py"),
    35: ("huggingface/swift-transformers#330", "test_swift_transformers_330.py"),
    36: ("apple/coremltools#2631", "test_coremltools_2631.py"),
    37: ("apple/coremltools#2716", "test_coremltools_2716.py"),
    38: ("apple/coreai-models#84", "test_coreai_models_84.py"),
}
NOT_VISIBLE_ON_LINUX = {
    30: (
        "apple/coremltools#2351",
        "merging sixteen functions of a billion parameters takes memory for each; ours are two",
    ),
    32: (
        "pytorch/executorch#21855",
        "`must be an MLState, but it was not` is an error of another exporter's runtime",
    ),
    33: (
        "apple/coremltools#2758",
        "that a program loads uncompiled and is killed at its first prediction shows on devices",
    ),
}


def test_every_report_has_a_row() -> None:
    numbers = set(range(1, 39)) - {14, 34}  # these two numbers were never given to a report
    assert {*COVERED, *NOT_VISIBLE_ON_LINUX} == numbers
    assert not set(COVERED) & set(NOT_VISIBLE_ON_LINUX)


@pytest.mark.parametrize("row", COVERED)
def test_the_file_exists_and_cites_its_report(row: int) -> None:
    report, file = COVERED[row]
    text = (FOLDER / file).read_text()
    assert report in text.split('"""')[1]
    assert "\ndef test_" in text


def test_what_is_not_visible_has_a_reason() -> None:
    assert all(len(reason) > 40 for _, reason in NOT_VISIBLE_ON_LINUX.values())
