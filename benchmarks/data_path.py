"""Waits for batches of token shards: a step computes for 50 ms, a thread reads the next batches meanwhile.

python benchmarks/data_path.py                         1,000 steps, 5 MB of tokens each, from 2 GB of shards
python benchmarks/data_path.py --prefetch 0            each batch is read when it is due: how long reading takes
python benchmarks/data_path.py --mask                  with the numbers of documents
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from quintsched.runtime.data import BatchSampler, TokenDataset, load_dataset  # noqa: E402
from quintsched.runtime.data.prefetch import prefetched  # noqa: E402
from quintsched.runtime.settings.job_file import DataConfig  # noqa: E402
from quintsched.tokens import TokenWriter  # noqa: E402

VOCABULARY, DOCUMENT = 50_000, 1000
"""Ids of two bytes; mean length of a document."""


def write(folder: Path, tokens: int) -> None:
    """Write random tokens, in four shards."""
    chance = np.random.default_rng(0)
    block = chance.integers(0, VOCABULARY, 2**22, dtype=np.uint16)
    with TokenWriter(folder, vocabulary=VOCABULARY, tokenizer="random", shard_tokens=tokens // 4) as writer:
        left = tokens
        while left > 0:
            length = int(chance.integers(1, 2 * DOCUMENT))
            start = int(chance.integers(0, len(block) - length))
            writer.add(block[start : start + length])
            left -= length


def compute(seconds: float, square: torch.Tensor) -> None:
    """Compute for a time, as a step does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(square, square)


def waits(dataset: TokenDataset, batch: int, steps: int, step_s: float) -> tuple[list[float], list[float]]:
    """Return how long each step waits for its batch (but the first), and what reading one takes of a core; seconds."""
    sampler = BatchSampler(num_samples=len(dataset.train), batch_size=batch, shuffle=False)
    endless = (indices for epoch in range(steps) for indices in sampler.batches(epoch))
    found, costs, square = [], list[float](), torch.rand(256, 256)

    def read(indices: np.ndarray) -> tuple[Any, ...]:
        began = time.thread_time()
        given = dataset.train.batch(indices)
        costs.append(time.thread_time() - began)
        return given

    batches = prefetched(map(read, endless), dataset.prefetch)
    for _ in range(steps + 1):
        began = time.perf_counter()
        inputs, _, _ = next(batches)
        found.append(time.perf_counter() - began)
        assert inputs is not None
        compute(step_s, square)
    batches.close()
    return found[1:], costs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--megabytes", type=float, default=5.0, help="tokens of a step, in the shards")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of shards")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--prefetch", type=int, default=4)
    parser.add_argument("--mask", action="store_true", help="with mask_documents")
    parser.add_argument("--folder", type=Path, help="for the shards; default: a temporary one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write(Path(folder) / "tokens", int(given.gigabytes * 1e9 / 2))
        options = {"sequence": given.sequence, "mask_documents": given.mask, "prefetch": given.prefetch}
        dataset = load_dataset(DataConfig(name="tokens", path=f"{folder}/tokens", options=options))
        assert isinstance(dataset, TokenDataset)
        batch = round(given.megabytes * 1e6 / 2 / given.sequence)
        found, costs = (np.array(of) * 1e3 for of in waits(dataset, batch, given.steps, given.step_ms / 1e3))
    print(
        f"{given.steps} steps of {given.step_ms:g} ms, {batch} samples of {given.sequence} tokens "
        f"({batch * given.sequence * 2 / 1e6:.1f} MB) each, prefetch {given.prefetch}\n"
        f"waits under 1 ms: {(found < 1).mean():.1%}; median {np.median(found):.3f} ms, 99 % under "
        f"{np.quantile(found, 0.99):.3f} ms, longest {found.max():.3f} ms\n"
        f"reading a batch takes {np.median(costs):.1f} ms of a core"
    )


if __name__ == "__main__":
    main()
