"""Files that are read and then used, as a command does: models, hardware and measured files in predictions,
certificates in checks. Only values are changed, so that the files stay JSON."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quintsched.strategies.commands.measured_flags import MeasuredStart
from quintsched.strategies.commands.predict_command import predicted
from quintsched.strategies.commands.prediction_report import as_data, describe
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model, hardware_names, model_names
from quintsched.strategies.profiles import aceso
from quintsched.strategies.profiles.profile import Profile
from quintsched.strategies.tuning.check_search_certificate import check_certificate
from quintsched.strategies.tuning.search_certificate import load_certificate

DATA = Path(__file__).parents[1] / "data"

SMALL = {"model": "gpt-1.3b", "hardware": "a100-80gb", "gpus": 8, "pp": 2, "tp": 2, "batch": 32, "seq": 1024}
TINY = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 1000, "seq": 128, "dropout": False}
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "rope_theta": 1e4,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def told(row: Mapping[str, Any], start: MeasuredStart | None = None) -> object:
    """Predict a row, and say it in both ways."""
    found = predicted(row, start)
    return [*describe(found), json.dumps(as_data(found), allow_nan=False)]


def models() -> list[bytes]:
    seeds = [find_model(name).model_dump_json(exclude_defaults=True).encode() for name in model_names()[::3]]
    like = json.dumps({"like": "llama-2-7b", "layers": 4, "experts": {"count": 8, "top_k": 2, "ffn": 1024}}).encode()
    return [*seeds, json.dumps(CONFIG).encode(), like]


@cache
def calibrated() -> dict[str, Any]:
    """A machine that was measured."""
    curve = {"sizes": [1e3, 1e6, 1e9], "rates": [1e9, 5e9, 1e10]}
    measured = {
        "matmul": {"fp32": curve}, "attention": {"fp32": curve}, "attention_backward": {"fp32": curve}, "memory": curve,
        "optimizer": curve, "link": curve, "all_reduce": {"2": curve, "8": curve}, "link_work": curve,
        "all_reduce_work": {"2": curve, "8": curve}, "kernel_s": 1e-5, "cores": 2, "sharing": {"1": 1.0, "8": 0.8},
    }  # fmt: skip
    plain = {"tflops": {"fp32": 0.1, "bf16": 0.1}, "processors": 1, "memory_gb": 64, "memory_gbps": 20}
    return {**plain, "link_gbps": 1, "network_gbps": 1, "measured": measured}


def hardware() -> list[bytes]:
    seeds = [find_hardware(name).model_dump_json(exclude_defaults=True).encode() for name in hardware_names()[::3]]
    return [*seeds, json.dumps(calibrated()).encode(), json.dumps(calibrated()).encode()]


def profiles() -> list[bytes]:
    """Operators as Aceso has them, whole and in our words, and a step that was measured."""
    tables = aceso_tables()
    operators = aceso.assemble(aceso.tables(tables["profiles"], "aceso"), "aceso").model_dump_json(
        exclude_defaults=True
    )
    step = {
        "model": TINY,
        "strategy": {"gpus": 1, "batch": 2, "seq": 128, "dtype": "fp32"},
        "seconds": {"product": 0.4, "pass": 0.1},
    }
    curve = {"sizes": [1e3, 1e9], "rates": [1e9, 1e10]}
    assert Profile.model_validate({"steps": [step]})
    return [operators.encode(), json.dumps(tables).encode(), json.dumps({"steps": [step], "message": curve}).encode()]


def aceso_tables() -> dict[str, Any]:
    """Aceso's files as they were published as JSON."""
    tables = {}
    for path in sorted((DATA / "aceso").glob("*.csv")):
        head, *rows = (line.split(",") for line in path.read_text().splitlines())
        numbers = [[cell if cell[:1].isalpha() else float(cell) for cell in row] for row in rows]
        tables[path.stem] = {"columns": head, "rows": numbers}
    return {"profiles": tables}


def traces() -> list[bytes]:
    return [(DATA / "kineto_cpu_step.json").read_bytes()]


def predict_with(key: str) -> Callable[[Path], object]:
    """Return what predicts a small step with a file in place of `key` of it."""
    return lambda path: told({**SMALL, key: path})


def predict_measured(path: Path) -> object:
    """Predict from a file of measured operators or steps."""
    return told({**SMALL, "dtype": "fp16", "seq": 2048, "tp": 1, "pp": 2, "gpus": 2}, MeasuredStart(path, {}))


def predict_traced(path: Path) -> object:
    """Predict from a trace of torch.profiler."""
    row = {"model": TINY, "hardware": "l4", "gpus": 1, "batch": 2, "microbatch": 2, "dtype": "fp32"}
    return told(row, MeasuredStart(path, {}))


def check_read(path: Path) -> object:
    """Read a certificate, and check it."""
    return check_certificate(load_certificate(path))
