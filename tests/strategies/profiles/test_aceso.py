"""Aceso's files: what they say is read, what they do not say is known, and steps composed of them match runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.aceso import predicted_runs
from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.profiles.aceso import read_folder, read_layout
from quintsched.strategies.profiles.operator_layout import OperatorLayout, Placed, Stage
from quintsched.strategies.profiles.operator_rates import Rates
from quintsched.strategies.profiles.profile import Profile
from quintsched.strategies.profiles.read_profile import read_profile, write_profile
from quintsched.strategies.profiles.stage_peak_memory import segments, stage_memory
from quintsched.strategies.profiles.stage_times import exchange, stage_time
from quintsched.strategies.profiles.step_from_profile import compose

FOLDER = Path(__file__).parents[2] / "data" / "aceso"
RUNS = Path(__file__).parents[3] / "benchmarks" / "data" / "aceso_l4.json"
MIB = 2**20


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_folder(FOLDER)


def config(**changes: object) -> dict[str, object]:
    """One layer of a GPT on two stages, the second recomputing all but the head."""
    return {
        "num_layers": 1,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "num_gpus": [1, 1],
        "checkpoint_activations": [False, True],
        "num_ops_in_each_stage": [8, 8],
        "model_parallel_size_of_each_op": [[[1, 8]], [[1, 8]]],
        "data_parallel_size_of_each_op": [[[1, 8]], [[1, 8]]],
        "recompute_ops": [[[0, 8]], [[1, 6], [0, 2]]],
        "algo_of_each_op": [[[0, 8]], [0] * 8],
    } | changes


def one_stage(*names: str, tp: int = 1, recompute: bool = False) -> OperatorLayout:
    return OperatorLayout((Stage(tuple(Placed(name, tp, recompute=recompute) for name in names), tp),), batch=4)


def test_sizes_of_the_model_follow_from_the_files(profile):
    qkv = Rates(profile).find("enc-attention-qkv")
    assert qkv.seq == 2048
    assert qkv.flops == 2 * 2048 * 3 * 2048**2
    assert qkv.forward_s == pytest.approx(853.01e-6, rel=1e-4)
    assert (qkv.output / MIB, qkv.passed / MIB) == (24, 8)


def test_collectives_are_those_of_megatron(profile):
    rates = Rates(profile)
    hidden = 8 * MIB
    summed = {
        name: (rates.find(name, tp=2).all_reduce_forward, rates.find(name, tp=2).all_reduce_backward)
        for name in ("encoder-embedding", "enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1")
    }
    assert summed == {
        "encoder-embedding": (hidden, 0.0),
        "enc-attention-qkv": (0.0, hidden),
        "enc-attention-dense": (hidden, 0.0),
        "enc-MLP-GEMM-1": (0.0, hidden),
    }


def test_a_product_is_as_fast_as_the_best_of_no_more_work(profile):
    """The large product of the excerpt ran at 54 TFLOP/s by itself, a smaller one at 80."""
    rates = Rates(profile)
    large, half = rates.find("enc-MLP-GEMM-1"), rates.find("enc-MLP-GEMM-2", tp=2)
    best = half.flops / half.backward_s
    assert large.flops / large.forward_s < 0.7 * best
    timed = rates.timed("enc-MLP-GEMM-1", 1, 1, 0)
    assert timed.forward_s == pytest.approx(large.flops / best, rel=1e-6)
    assert timed.backward_s == pytest.approx(2 * timed.forward_s), "the weight's gradient was not measured"
    measured = Rates(profile.model_copy(update={"alone": False}))
    assert measured.timed("enc-MLP-GEMM-1", 1, 1, 0).forward_s == large.forward_s


def test_adding_gradients_up_is_counted_but_for_the_first_microbatch(profile):
    layout = one_stage("enc-MLP-GEMM-1")
    moved = 3 * 32 * MIB * 3 / 4
    assert stage_time(Rates(profile), layout, layout.stages[0]).accumulate_s == pytest.approx(
        moved / (profile.memory_rate or 0)
    )


def test_what_was_not_measured_comes_from_the_nearest(profile):
    rates = Rates(profile)
    measured, scaled = rates.find("enc-MLP-gelu", tp=2), rates.find("enc-MLP-gelu", tp=4)
    assert scaled.forward_s == pytest.approx(measured.forward_s / 2)
    assert scaled.kept == pytest.approx(measured.kept / 2)
    norm = rates.find("enc-1st-layernorm", tp=4)
    assert norm.forward_s == rates.find("enc-1st-layernorm", tp=2).forward_s
    more = rates.find("enc-attention-dense", tp=2, microbatch=4)
    alone = more.forward_s - rates.collective_s("all_reduce", 2, more.all_reduce_forward)
    assert more.all_reduce_forward == 32 * MIB
    assert alone > 0


def test_layouts_are_read_run_length_coded_or_not():
    layout = read_layout(config())
    assert [len(stage.operators) for stage in layout.stages] == [8, 8]
    assert [placed.recompute for placed in layout.stages[1].operators] == [True] * 6 + [False] * 2
    assert layout.stages[1].operators[-1].name == "gpt-post-process"
    assert layout.microbatches == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 2}, "hold 16 operators"),
        ({"num_layers": None}, "not a configuration"),
        ({"algo_of_each_op": [[[0, 8]]]}, "not a configuration"),
    ],
)
def test_broken_layouts_are_refused(change, said):
    with pytest.raises(InputError, match=said):
        read_layout(config(**change))


def test_segments_break_at_each_layer():
    names = ("enc-MLP-gelu", "enc-MLP-GEMM-2", "enc-post-MLP-dropout", "enc-1st-layernorm", "enc-attention-qkv")
    stage = one_stage(*names, recompute=True).stages[0]
    parts = [(part.begin, part.end) for part in segments(stage, ("enc-1st-layernorm",))]
    assert parts == [(0, 3), (3, 5)]
    kept = Stage(tuple(replace(placed, recompute=False) for placed in stage.operators))
    assert [part.recomputed for part in segments(kept, ("enc-1st-layernorm",))] == [False] * 5


def test_a_layer_keeps_what_the_paper_says(profile):
    """Korthikanti et al. (arXiv:2205.05198): a layer keeps s·b·h·(34 + 5·a·s/h) bytes, in fp16."""
    layers = OperatorLayout((Stage(tuple(Placed(name) for name in profile.layer)),) * 2, batch=4)
    memory = stage_memory(Rates(profile), layers, 0)
    seq, hidden, heads = 2048, 2048, 32
    expected = seq * hidden * (34 + 5 * heads * seq / hidden)
    received = 8 * MIB
    assert memory.waiting - received == pytest.approx(expected, rel=0.001)


def test_a_recomputed_layer_keeps_its_input_and_output(profile):
    stage = Stage(tuple(Placed(name, recompute=True) for name in profile.layer))
    memory = stage_memory(Rates(profile), OperatorLayout((stage, stage), batch=4), 0)
    assert memory.waiting == 2 * 8 * MIB


def test_messages_between_nodes_take_longer(profile):
    layout = read_layout(config())
    near = exchange(Rates(profile), layout, 0)
    far = exchange(Rates(profile), replace(layout, gpus_per_node=1), 0)
    assert far.forward_s > 2 * near.forward_s
    assert near.both_s == pytest.approx(near.forward_s + near.backward_s)  # both pass the host's memory
    assert far.both_s == pytest.approx(max(far.forward_s, far.backward_s))  # links of a network are full duplex


def test_a_whole_tensor_is_sent_in_parts_and_gathered(profile):
    cut = [[[2, 8]], [[2, 8]]]
    layout = read_layout(config(model_parallel_size_of_each_op=cut, num_gpus=[2, 2]))
    rates = Rates(profile)
    sent = exchange(rates, layout, 0)
    handed = 2 * 8 * MIB  # what attention gives, and the residual
    message = rates.message_s(handed / 2, network=False)
    gathered = rates.collective_s("all_gather", 2, handed / 2)
    assert sent.forward_s == pytest.approx(message + gathered, rel=1e-3)


def test_replicas_share_the_microbatch(profile):
    layout = read_layout(
        config(micro_batch_size=2, num_gpus=[2, 2], data_parallel_size_of_each_op=[[[2, 8]], [[2, 8]]])
    )
    single = read_layout(config(global_batch_size=4))
    both = [compose(profile, each) for each in (layout, single)]
    assert both[0].stages[0].forward_s == both[1].stages[0].forward_s
    assert both[0].end_s > both[1].end_s


def test_terms_of_a_step_add_up(profile):
    found = compose(profile, read_layout(config()))
    assert sum(found.breakdown_s().values()) == pytest.approx(found.step_s)
    assert all(seconds >= 0 for seconds in found.breakdown_s().values())


@pytest.mark.parametrize("slower", [1, 100])
def test_terms_are_not_negative_where_collectives_are_most_of_a_recomputed_stage(profile, slower):
    curves = {
        kind: {n: Curve(sizes=c.sizes, rates=tuple(rate / slower for rate in c.rates)) for n, c in known.items()}
        for kind, known in profile.collectives.items()
    }
    placed = tuple(Placed(name, tp=2, recompute=True) for name in profile.layer)
    layout = OperatorLayout((Stage(placed), Stage(placed)), batch=8)
    found = compose(profile.model_copy(update={"collectives": curves}), layout).breakdown_s()
    assert found["tp"] > 0
    assert all(seconds >= -1e-12 for seconds in found.values())


def test_profiles_survive_their_file(profile, tmp_path):
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_a_folder_is_recognised():
    assert read_profile(FOLDER, size="1.3b").name == "gpt-1.3b"
    with pytest.raises(UsageError, match="no profile of a GPT of size '7B'"):
        read_profile(FOLDER, size="7B")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpt_1_3B_mbs1_tp1_algo0", "enc-MLP-gelu,1,2,x,4,5,6,0,0"),
        ("prim_gpt_1_3B_all_reduce_2gpus", "8,fast"),
        ("p2p_intra_node", "1,x"),
    ],
)
def test_broken_lines_are_refused(tmp_path, name, line):
    for file in FOLDER.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    head = (tmp_path / f"{name}.csv").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / f"{name}.csv").write_text(f"{head}\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=name):
        read_folder(tmp_path)


def test_operators_that_failed_are_left_out(tmp_path):
    text = (FOLDER / "gpt_1_3B_mbs1_tp1_algo0.csv").read_text(encoding="utf-8")
    (tmp_path / "gpt_1_3B_mbs1_tp1_algo0.csv").write_text(text, encoding="utf-8")
    failed = "\n".join(
        [text.splitlines()[0], *(f"{line.split(',')[0]}{',10000000.000' * 8}" for line in text.splitlines()[1:])]
    )
    (tmp_path / "gpt_1_3B_mbs8_tp1_algo0.csv").write_text(failed, encoding="utf-8")
    assert {operator.microbatch for operator in read_folder(tmp_path).operators} == {1}


def test_unknown_operators_are_named(profile):
    with pytest.raises(MisfitError, match=r"no 'enc-MLP-relu'; did you mean 'enc-MLP-gelu'"):
        Rates(profile).find("enc-MLP-relu")


def test_measured_runs_are_predicted():
    """Seven runs on L4 GPUs: time below Aceso's own 9.8 %, `max_allocated` within 4 %."""
    runs = predicted_runs(RUNS)
    assert len(runs) == len(json.loads(RUNS.read_text(encoding="utf-8"))["rows"]) == 7
    times = [abs(run.time_error) for run in runs]
    memory = [abs(error) for run in runs for error in run.memory_errors]
    assert sum(times) / len(times) < 0.03
    assert max(times) < 0.05
    assert sum(memory) / len(memory) < 0.01
    assert max(memory) < 0.03
