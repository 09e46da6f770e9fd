"""Facts that docs/comparison.md states of other projects: in their packages as installed, or run on a CPU."""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from quintsched import torch_csv
from quintsched.errors import InputError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "comparison.md").read_text("utf-8")
PIPELINES = "torchtitan/distributed/pipeline_parallel.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
HF_UTILS = "nemo_automodel/components/distributed/pipelining/hf_utils.py"
FACTS = [
    ("torchtitan", PIPELINES, r"get_schedule_class\(parallelism\.pipeline_parallel_schedule\)"),
    ("torchtitan", PIPELINES, r"_PipelineScheduleRuntime"),
    ("torchtitan", "torchtitan/components/quantization/float8.py", r"Float8"),
    ("torchtitan", "torchtitan/components/checkpointer/dcp.py", r"TorchFT"),
    ("megatron-core", SCHEDULES, r"def forward_backward_pipelining_with_interleaving"),
    ("megatron-core", SCHEDULES, r"def forward_backward_pipelining_without_interleaving"),
    ("megatron-core", "megatron/core/pipeline_parallel/combined_1f1b.py", r"1F1B|1f1b"),
    ("megatron-core", "megatron/core/transformer/transformer_config.py", r"pipeline_model_parallel_layout: Optional"),
    ("megatron-core", "megatron/core/fp8_utils.py", r"fp8"),
    ("deepspeed", "deepspeed/runtime/pipe/schedule.py", r"class TrainSchedule\(PipeSchedule\)"),
    ("deepspeed", "deepspeed/runtime/pipe/schedule.py", r"class DualPipeVSchedule\(PipeSchedule\)"),
    ("deepspeed", "deepspeed/runtime/pipe/engine.py", r"ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
    ("deepspeed", "deepspeed/runtime/zero/offload_config.py", r"nvme"),
    ("nemo-automodel", HF_UTILS, r"is_encoder_decoder"),
    ("nemo-automodel", HF_UTILS, r"does not support tie_word_embeddings=True"),
    ("torchft-nightly", "torchft/manager.py", r"lighthouse"),
]
"""Package, file in it, and what it says."""
VERSIONS = {"torchtitan": "torchtitan", "megatron-core": "Megatron Core", "deepspeed": "DeepSpeed"} | {
    "nemo-automodel": "NeMo AutoModel"
}

pytestmark = pytest.mark.slow


def installed(package: str) -> str:
    """Return a package's version; skips where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        pytest.skip(f"needs pip install --no-deps {package}")


@pytest.mark.engines
@pytest.mark.parametrize(("package", "file", "says"), FACTS)
def test_a_package_is_as_the_page_says(package: str, file: str, says: str) -> None:
    installed(package)
    spec = find_spec(file.partition("/")[0])
    assert spec.submodule_search_locations is not None
    (path,) = {Path(place).parent / file for place in spec.submodule_search_locations}
    assert re.search(says, path.read_text("utf-8")), f"{path}: docs/comparison.md is out of date"


@pytest.mark.engines
@pytest.mark.parametrize("package", VERSIONS)
def test_the_page_names_the_version_that_was_looked_at(package: str) -> None:
    major, minor, *_ = installed(package).split(".")
    assert f"| {VERSIONS[package]} {major}.{minor} |" in PAGE


def test_megatron_has_no_other_schedules() -> None:
    installed("megatron-core")
    folder = Path(str(find_spec("megatron.core").submodule_search_locations[0]))  # type: ignore[union-attr, index]
    assert not [path for path in folder.rglob("*.py") if re.search(r"zero.?bubble", path.read_text("utf-8"), re.I)]


TWICE = "0F0,0F1,0B0,0B0,0B1\n1F0,1B0,1F1,1B1\n"
CROSSES = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"


@pytest.mark.parametrize(
    ("text", "why"), [(TWICE, "0B0"), (CROSSES, "deadlock: under the transport profile 'blocking'")]
)
def test_torch_accepts_orders_that_are_refused_here(text: str, why: str) -> None:
    from torch.distributed.pipelining import schedules

    rows = enumerate(line.split(",") for line in text.splitlines())
    actions = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in rows}
    is_computed = lambda action: action is not None and not re.search("SEND|RECV", str(action))  # noqa: E731
    computations = {rank: list(filter(is_computed, row)) for rank, row in actions.items()}
    schedules._validate_schedule(computations, 2, 2, 2)
    with pytest.raises(InputError, match=re.escape(why)):
        torch_csv.loads(text, profile="blocking")


def test_torch_has_the_schedules_that_the_page_lists() -> None:
    from torch.distributed.pipelining import schedules

    found = {name.removeprefix("Schedule") for name in dir(schedules) if name.startswith("Schedule")}
    interleaved = {"Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble"}
    assert found == {"1F1B", "DualPipeV", "GPipe"} | interleaved
