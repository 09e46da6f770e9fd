"""Train any causal language model of transformers, on any mesh.

python examples/huggingface.py                                                  a tiny LLaMA of its own, one process
torchrun --nproc-per-node 4 examples/huggingface.py --mesh dp=2,pp=2            the same on four
torchrun --nproc-per-node 4 examples/huggingface.py --mesh pp=2,tp=2 --model gpt2
"""

import argparse
from pathlib import Path

import torch

import quintsched as qs
from quintsched.errors import import_advice
from quintsched.runtime import Engine, split

try:
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError as error:
    raise SystemExit(f"error: {error}{import_advice(error)}") from error

parser = argparse.ArgumentParser()
for flag, default in {"model": "", "mesh": "dp=1", "schedule": "1f1b", "microbatches": 4, "steps": 20}.items():
    parser.add_argument(f"--{flag}", default=default, type=type(default))
options = parser.parse_args()
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256)
build, of = AutoModelForCausalLM.from_pretrained, options.model
blocks = split(build(of).train() if of else AutoModelForCausalLM.from_config(config))
plan = qs.compile(options.schedule, mesh=options.mesh, microbatches=options.microbatches)
engine = Engine(plan, blocks, blocks.loss_fn, lambda weights: torch.optim.AdamW(weights, lr=1e-3))
batch = torch.tensor(list(Path(__file__).read_bytes()[:1024])).view(16, 64)  # this file, byte by byte
share = batch.chunk(engine.num_replicas)[engine.replica]
for _ in range(options.steps):
    loss = engine.step(share, share).loss.item()
if engine.transport.rank == 0:
    print(f"after {options.steps} steps the loss is {loss:.4f}")
engine.close()
