"""A report document with made-up numbers and hostile texts, as `build_report` would give it."""

import math
from typing import Any

from pydantic import TypeAdapter

from upcycle.report.schema import ReportDocument

HOSTILE = "<script>alert('x')</script> & `code` ``` | pipe"


def spread(scale: float) -> dict[str, float]:
    return {
        "mean": scale,
        "median": scale / 4,
        "p90": scale * 2.5,
        "p99": scale * 9,
        "max": scale * 40,
    }


def divergence(scale: float) -> dict[str, Any]:
    starts = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    edges = [-4 + 0.25 * i for i in range(33)]
    return {
        "kl": spread(scale),
        "top1_agreement": 1 - scale / 3,
        "nll_difference": scale * 0.9,
        "nll_interval": {"low": scale * 0.84, "high": scale * 0.97},
        "by_position": [
            {
                "first": first,
                "last": 2 * first - 1,
                "tokens": 80 * first,
                "kl_mean": scale * (0.6 + 0.08 * i),
                "nll_difference": scale * 0.8,
            }
            for i, first in enumerate(starts)
        ],
        "nll_histogram": {
            "edges": edges,
            "counts": [
                round(40000 * math.exp(-abs(e - scale / 2) / (0.1 + scale / 4))) + 1
                for e in edges[:-1]
            ],
        },
        "worst_tokens": [
            {"before": "a" * 80 + "\n    ", "token": "return", "source_nll": 0.1, "model_nll": 9.4},
            {"before": HOSTILE, "token": "|`", "source_nll": 0.5, "model_nll": 7.2},
        ],
    }


def model(
    label: str, kv_heads: int, parameters: int, nll: float, kl: float | None
) -> dict[str, Any]:
    cache = 4 * kv_heads * 32 * 2 * 2
    return {
        "label": label,
        "num_parameters": parameters,
        "weight_bytes": parameters * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "kv_cache": {
            "stored_dtype": "float16",
            "bytes_per_token": cache,
            "measured_dtype": "float32",
            "predicted_bytes_per_token": cache * 2,
            "measured_bytes_per_token": float(cache * 2),
        },
        "nll": nll,
        "perplexity": math.exp(nll),
        "word_perplexity": math.exp(nll * 3.1),
        "bits_per_byte": nll / math.log(2) / 3.2,
        "divergence": None if kl is None else divergence(kl),
    }


def continuation(
    label: str, at: int | None, agreed: str, diverging: str, rest: str
) -> dict[str, Any]:
    return {
        "label": label,
        "tokens": list(range(48)),
        "first_divergence": at,
        "agreed": agreed,
        "diverging": diverging,
        "rest": rest,
        "repetition": 0.25,
    }


EXPORT: dict[str, Any] = {
    "context": 512,
    "operations": 312,
    "kv_tiles": 0,
    "kv_tile_bytes": 0,
    "bytes_per_token": {
        "weights": 6_700_000,
        "kv_read": 524_288,
        "kv_write": 1_024,
        "copies": 0,
        "activations": 90_000,
        "total": 7_315_312,
    },
    "compared": {
        "source": {
            "num_key_value_heads": 8,
            "kv_tiles": 0,
            "bytes_per_token": 8_888_000,
            "tokens_per_second": 6289.4,
        },
        "repeat-kv": {
            "num_key_value_heads": 2,
            "kv_tiles": 0,
            "bytes_per_token": 11_500_000,
            "tokens_per_second": 4860.9,
        },
        "qfold": {
            "num_key_value_heads": 2,
            "kv_tiles": 0,
            "bytes_per_token": 7_315_312,
            "tokens_per_second": 7641.5,
        },
    },
    "bandwidth": 55_900_000_000,
}


def example(*, margins: bool = True, training: bool = True, export: bool = True) -> ReportDocument:
    """The same, as `write_report` takes it."""
    return typed(document(margins=margins, training=training, export=export))


def typed(report: dict[str, Any]) -> ReportDocument:
    """A report that was changed as JSON, as `write_report` takes it."""
    return TypeAdapter(ReportDocument).validate_python(report)


def document(*, margins: bool = True, training: bool = True, export: bool = True) -> dict[str, Any]:
    text = "    parser = argparse.ArgumentParser()\n    parser.add_argument('-v', "
    manifest = {
        "schema": 1,
        "stage": "convert",
        "source": {"model.safetensors": "xxh3-128:0123456789abcdef0123456789abcdef"},
        "options": {"kv_heads": 2, "method": "mean", "note": HOSTILE},
        "versions": {"upcycle": "0.1.0", "python": "3.11.9"},
        "result": {},
    }
    return {
        "schema": 1,
        "command": "upcycle eval demo-source runs/converted runs/uptrained --out runs/report",
        "versions": {"upcycle": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        "comparison": {
            "text": {
                "files": ["heldout.jsonl"],
                "hashes": ["xxh3-128:fedcba9876543210fedcba9876543210"],
                "packaged": True,
                "documents": 61,
                "windows": 97,
                "tokens": 39903,
                "bytes": 128764,
                "words": 12871,
                "sequence_length": 512,
                "bos": True,
            },
            "settings": {
                "device": "cpu",
                "dtype": "float32",
                "batch_size": 8,
                "new_tokens": 48,
                "bootstrap_resamples": 2000,
            },
            "models": [
                model("source", 8, 3_739_904, 3.4012, None),
                model("converted", 2, 3_346_688, 4.2231, 0.7214),
                model("uptrained", 2, 3_346_688, 3.4466, 0.0412),
            ],
            "noise_floor": {
                "batch_sizes": [8, 1],
                "tokens": 8176,
                "kl_mean": 3.1e-10,
                "kl_max": 4.2e-7,
                "nll_difference_mean": 2.2e-7,
                "nll_difference_max": 3.4e-6,
                "top1_agreement": 1.0,
            },
            "generations": [
                {
                    "prompt": "def main(",
                    "continuations": [
                        continuation("source", None, f"):\n{text}'--verbose')\n", "", ""),
                        continuation("converted", 1, ")", ":", " self, self, self, self, self"),
                        continuation("uptrained", 17, f"):\n{text}", "\n", f"'--quiet') {HOSTILE}"),
                    ],
                }
            ],
            "margins": [
                {
                    "name": "kl_mean",
                    "label": "uptrained",
                    "limit": 0.05,
                    "value": 0.0412,
                    "passed": True,
                },
                {
                    "name": "nll_increase",
                    "label": "uptrained",
                    "limit": 0.03,
                    "value": 0.03996,
                    "passed": False,
                },
            ]
            if margins
            else [],
        },
        "warnings": [],
        "provenance": [
            {
                "label": label,
                "folder": folder,
                "files": {
                    "config.json": "xxh3-128:00112233445566778899aabbccddeeff",
                    "model.safetensors": "xxh3-128:0123456789abcdef0123456789abcdef",
                },
                "manifest": None if label == "source" else manifest,
            }
            for label, folder in (
                ("source", "demo-source"),
                ("converted", "converted"),
                ("uptrained", "uptrained"),
            )
        ],
        "training": {
            "steps": 50,
            "tokens": 204800,
            "points": [{"step": i, "loss": 0.75 * math.exp(-i / 12) + 0.05} for i in range(1, 51)],
            "held_out": [
                {
                    "step": s,
                    "kl": 0.72 * math.exp(-s / 14) + 0.04,
                    "nll": 3.42 + 0.8 * math.exp(-s / 14),
                }
                for s in (0, 25, 50)
            ],
        }
        if training
        else None,
        "export": EXPORT if export else None,
    }
