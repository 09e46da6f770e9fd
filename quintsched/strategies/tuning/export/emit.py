"""Export of a strategy as files that run it: the plan, and a job file.

    strategy ──▶ DIR/plan.json      compiled and proved
             └─▶ DIR/job.yaml       model, data, parallel, train, runtime; quintsched run DIR/plan.json DIR/job.yaml

    for another framework ──▶ DIR/megatron.args, or likewise: the arguments of that framework

One of the runtime's built-in models (gpt, moe-gpt, vit) runs without changes, on the runtime's example data, or on
token shards of its vocabulary; for other models the job file has placeholders. Where the runtime deviates from the
strategy, a comment in the job file says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quintsched.errors import UsageError
from quintsched.files.atomic import write_whole
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy, modules_of
from quintsched.strategies.descriptions.strategy_text import strategy_name
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.strategy_plans import parallel, plan_of
from quintsched.strategies.tuning.export.frameworks import find_framework

PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
OWN_MODEL = "my_model.py:build"
OWN_DATA = "my_data.py:load"
TOKENS_FOLDER = "tokens"
"""Folder of token shards in a job file."""
BYTE_VOCABULARY = 256
"""Vocabulary of text read as bytes."""


@dataclass(frozen=True)
class Emitted:
    """Files that were written."""

    files: dict[str, Path]
    """By what they are: plan and job, or arguments."""
    start: str
    """Command that runs them."""
    notes: tuple[str, ...]
    """Placeholders to fill in, and differences of the run from the strategy."""

    def as_data(self) -> dict[str, Any]:
        """Return the files and notes as JSON data."""
        return {name: str(path) for name, path in self.files.items()} | {"notes": list(self.notes)}


def emit_for(name: str, model: Model, strategy: Strategy, directory: str | Path) -> Emitted:
    """Write a framework's arguments into `directory`; those of our own runtime are a plan and a job file.

    Raises `UsageError` as `emit` does, and for an unknown framework.
    """
    framework = find_framework(name)
    if framework.text is None or framework.notes is None:
        return emit(model, strategy, directory)
    strategy = resolved(strategy)
    path = _folder(directory) / framework.file
    write_whole(path, framework.text(model, strategy), "the arguments")
    repository, parser, commit = framework.parser
    said = f"arguments of {repository}, {parser}, at {commit[:12]}"
    return Emitted({"arguments": path}, framework.start.format(file=path), (said, *framework.notes(model, strategy)))


def emit(model: Model, strategy: Strategy, directory: str | Path) -> Emitted:
    """Compile the strategy's plan and write it into `directory`, with a job file that runs it.

    Raises `UsageError` if the schedule does not take these sizes, or a file cannot be written.
    """
    folder, strategy = _folder(directory), resolved(strategy)
    plan, files = plan_of(model, strategy), {"plan": folder / "plan.json", "job": folder / "job.yaml"}
    plan.save(files["plan"])
    write_whole(files["job"], job_file(model, strategy), "the job file")
    return Emitted(files, f"quintsched run {files['plan']} {files['job']}", tuple(notes(model, strategy)))


def _folder(directory: str | Path) -> Path:
    """Return a directory, made if it is missing."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: the directory cannot be made: {error.strerror or error}") from None
    return folder


def job_file(model: Model, strategy: Strategy) -> str:
    """Return the text of a job file that runs a strategy."""
    strategy = resolved(strategy)
    name, options = built_in(model)
    job: dict[str, Any] = {
        "model": {"name": name, "options": options} if options is not None else {"name": OWN_MODEL},
        "data": _data(model, strategy, own=options is None),
        "parallel": parallel(model, strategy),
        "train": {
            "epochs": 1,
            "batch_size": strategy.batch,
            "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "decay": "matrices"},
            "clip": 1.0,
        },
        "runtime": {"precision": PRECISIONS.get(strategy.dtype, "bfloat16")},
    }
    said = [f"{model.name} on {strategy.gpus} ranks: {strategy_name(strategy)}", "  quintsched run plan.json job.yaml"]
    head = "".join(f"# {line}\n" for line in [*said, *notes(model, strategy)])
    sections = (yaml.safe_dump({section: job[section]}, sort_keys=False, width=110) for section in job)
    return head + "".join(sections)


def built_in(model: Model) -> tuple[str, dict[str, Any] | None]:
    """Return the name of the runtime's built-in model, and its options; None for those if none is equivalent."""
    name = "vit" if model.images else "moe-gpt" if model.experts else "gpt"
    if any(differences(model)):
        return name, None
    wide = model.experts.ffn if model.experts else model.ffn_width
    options: dict[str, Any] = {"hidden": model.hidden, "depth": model.layers, "heads": model.heads}
    options |= {"ffn": wide} if wide % model.hidden else {"mlp_ratio": wide // model.hidden}
    options |= {"dropout": 0.1 if model.dropout else 0.0}
    if model.images:
        return name, options | {"patch": model.images.patch}
    options |= {"norm": model.norm, "positions": model.positions, "activation": model.activation, "tied": model.tied}
    unusual = {
        "kv_heads": model.kv_heads,
        "head_size": model.head_size if model.head_width * model.heads != model.hidden else None,
        "biases": None if model.biases else False,
        "qk_norm": model.qk_norm or None,
        "rope_base": model.rope_base if model.positions == "rope" else None,
    }
    options |= {option: value for option, value in unusual.items() if value is not None}
    if experts := model.experts:
        options |= {"experts": experts.count, "top_k": experts.top_k, "every": experts.every}
        options["shared_experts"] = experts.shared
        if experts.padded_to is not None:
            options |= {"capacity_factor": experts.padded_to, "pad_to_capacity": True}
    return name, options


def differences(model: Model) -> Iterator[str]:
    """Yield the properties of a model that the runtime's built-in models lack."""
    if model.latent:
        yield "latent attention"
    if model.images:
        yield from _differences_of_images(model)
    if model.sinks:
        yield "sinks of attention"
    if model.attention_gate:
        yield "a gate of attention"
    if model.delta:
        yield "layers with a delta net"
    if model.parallel_block:
        yield "attention and feed-forward network side by side"
    if model.activation not in ("gelu", "swiglu") or (model.images and model.activation != "gelu"):
        yield f"the activation {model.activation}"
    if not model.images and model.positions not in ("learned", "rope"):
        yield f"positions: {model.positions}"
    if model.qkv_biases not in (None, model.biases):
        yield f"queries, keys and values {'with' if model.qkv_biases else 'without'} biases, unlike other projections"
    if model.experts and model.experts.first_dense:
        yield f"{model.experts.first_dense} dense layers before those with experts"
    if model.experts and not all(model.has_experts) and model.experts.ffn != model.ffn_width:
        yield f"experts of {model.experts.ffn} beside layers of {model.ffn_width}"


def _differences_of_images(model: Model) -> Iterator[str]:
    """Yield the properties that a GPT may have, but a ViT lacks."""
    if model.head_width * model.heads != model.hidden:
        yield f"heads of {model.head_width}"
    if model.ffn_width % model.hidden:
        yield f"a feed-forward network of {model.ffn_width}, which is no multiple of {model.hidden}"
    if not model.biases:
        yield "projections without biases"
    if model.qk_norm:
        yield "norms over heads"


def notes(model: Model, strategy: Strategy) -> Iterator[str]:
    """Yield the placeholders to fill in, and the differences of the run from the prediction."""
    name, options = built_in(model)
    if options is None:
        lacks = ", ".join(differences(model))
        yield f"model.name: your function that builds {model.name}; the built-in {name} does not have {lacks}"
        yield f"data.name: your function that loads samples, {strategy.seq} tokens each"
    elif model.images:
        yield f"data: images of {model.images.size} x {model.images.size} pixels, {model.images.channels} channels"
    elif model.vocab != BYTE_VOCABULARY:
        yield f"data.path: token shards of {model.vocab} token ids, which quintsched data tokenize writes"
    if modules_of(strategy.recompute):
        yield "recompute: the runtime recomputes blocks, not modules of them; nothing is recomputed here"
    if isinstance(strategy.recompute, (int, tuple)) and not isinstance(strategy.recompute, bool):
        yield "recompute: every k-th block of a stage, so that no fewer layers are recomputed than predicted"
    if strategy.dtype not in PRECISIONS:
        yield f"runtime.precision: the runtime has no {strategy.dtype}; bfloat16 is as wide"


def _data(model: Model, strategy: Strategy, *, own: bool) -> dict[str, Any]:
    if own:
        return {"name": OWN_DATA}
    if model.images:
        return {"name": "digits"}
    source = {"name": "text"} if model.vocab == BYTE_VOCABULARY else {"name": "tokens", "path": TOKENS_FOLDER}
    return {**source, "options": {"sequence": strategy.seq}}
