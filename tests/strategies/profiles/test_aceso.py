"""Aceso's files: what they say is read, and runs and strategies are predicted from them, of models of any size."""

import json
from functools import cache
from pathlib import Path

import pytest

import quintsched as qs
from benchmarks.aceso import predicted_runs
from quintsched.strategies.prediction.profiled.predict_from_profile import predict_from_profile
from quintsched.strategies.profiles.aceso import read_folder, read_layout
from quintsched.strategies.profiles.operator_layout import even_layout
from quintsched.strategies.profiles.operator_rates import Rates
from quintsched.strategies.profiles.profile import Profile
from quintsched.strategies.profiles.read_profile import read_profile
from quintsched.strategies.profiles.resize_profile import resized
from quintsched.strategies.profiles.step_from_profile import Composed, compose

FOLDER = Path(__file__).parents[2] / "data" / "aceso"
RUNS = Path(__file__).parents[3] / "benchmarks" / "data" / "aceso_l4.json"


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 2}, "hold 16 operators"),
        ({"num_layers": None}, "not a configuration"),
        ({"algo_of_each_op": [[[0, 8]]]}, "not a configuration"),
    ],
)
def test_broken_layouts_are_refused(change, said):
    with pytest.raises(qs.InputError, match=said):
        read_layout(config(**change))


def test_terms_of_a_step_add_up(profile):
    found = compose(profile, read_layout(config()))
    assert sum(found.breakdown_s().values()) == pytest.approx(found.step_s)
    assert all(seconds >= 0 for seconds in found.breakdown_s().values())


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
    with pytest.raises(qs.InputError, match=name):
        read_folder(tmp_path)


def test_unknown_operators_are_named(profile):
    with pytest.raises(qs.MisfitError, match=r"no 'enc-MLP-relu'; did you mean 'enc-MLP-gelu'"):
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


def test_a_folder_is_recognised():
    assert read_profile(FOLDER, size="1.3b").name == "gpt-1.3b"
    with pytest.raises(qs.UsageError, match="no profile of a GPT of size '7B'"):
        read_profile(FOLDER, size="7B")


MODEL = qs.Model(name="gpt-1.3b", layers=24, hidden=2048, heads=32, vocab=51200, attention="unfused")
HARDWARE = qs.find_hardware("l4")


def strategy(**changes: object) -> qs.Strategy:
    sizes = {"gpus": 2, "pp": 2, "batch": 32, "seq": 2048, "dtype": "fp16", "recompute": "selective"}
    return qs.Strategy.model_validate(sizes | changes)


def test_an_even_pipeline_is_near_a_measured_uneven_one(profile):
    """Two stages of 159 and 156 operators and other recomputation took 14.25 s."""
    found = predict_from_profile(MODEL, HARDWARE, strategy(), profile)
    assert found.step_s == pytest.approx(14.25, rel=0.1)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s)
    assert sum(found.breakdown_bytes.values()) == pytest.approx(found.memory_bytes)
    assert len(found.memory_bytes_per_rank) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 4, "cp": 2}, "no cp"),
        ({"zero": 1}, "no zero"),
        ({"schedule": "zb-h1"}, "not zb-h1"),
        ({"chunks": 2}, "no chunks"),
        ({"sequence_parallel": True}, "sequence parallelism"),
        ({"gpus": 4}, "gpus=4, but the mesh pp=2 has 2"),
        ({"batch": 33, "microbatch": 2}, "batch=33 does not divide"),
        ({"stages": (12, 13)}, "gpt-1.3b has 24"),
    ],
)
def test_what_operators_cannot_place_is_said(profile, changes, said):
    with pytest.raises((qs.MisfitError, qs.UsageError), match=said):
        predict_from_profile(MODEL, HARDWARE, strategy(**changes), profile)


def test_selective_recomputation_needs_attention(profile):
    blocks = tuple(one.model_copy(update={"kind": "block"}) for one in profile.operators)
    blind = profile.model_copy(update={"operators": blocks})
    with pytest.raises(qs.UsageError, match="which operators are attention"):
        predict_from_profile(MODEL, HARDWARE, strategy(), blind)


DATA = Path(__file__).parents[3] / "benchmarks" / "data"

MODELS = {
    "1_3b": qs.Model(layers=24, hidden=2048, heads=32, vocab=51200),
    "13b": qs.Model(layers=40, hidden=5120, heads=40, vocab=51200),
    "22b": qs.Model(layers=48, hidden=6144, heads=64, vocab=51200),
}


@cache
def profile_of(size: str) -> Profile:
    return read_profile(DATA / f"aceso_l4_{size}.json")


def step(profile: Profile, model: qs.Model, tp: int) -> Composed:
    strategy = qs.Strategy(gpus=4 * tp, tp=tp, pp=4, batch=64, seq=2048, recompute="selective", dtype="fp16")
    return compose(profile, even_layout(profile, strategy, model.layers, 8))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("measured", "wanted"), [("1_3b", "13b"), ("1_3b", "22b"), ("13b", "22b"), ("22b", "13b")])
def test_another_size_is_near_its_own_profile(measured, wanted, tp):
    model = MODELS[wanted]
    guessed = step(resized(profile_of(measured), model, 2048), model, tp)
    known = step(profile_of(wanted), model, tp)
    assert guessed.step_s == pytest.approx(known.step_s, rel=0.04)
    assert guessed.memory[0].peak == pytest.approx(known.memory[0].peak, rel=0.001)


@pytest.mark.parametrize("measured", ["1_3b", "22b"])
def test_one_profile_predicts_the_measured_runs_of_all_sizes(measured):
    """The profile of the 1.3B model, of at most eight GPUs of one node, for 13B on two nodes and 22B on four too.

    Not that of the 13B model: its 10 heads a GPU over four make Megatron leave its fused softmax, as 16 do not.
    """
    rows = json.loads((DATA / "aceso_l4.json").read_text(encoding="utf-8"))["rows"]
    errors = []
    for row in rows:
        profile = resized(profile_of(measured), MODELS[row["model"].lower()], 2048)
        errors.append(compose(profile, read_layout(row["config"])).step_s * 1e3 / row["measured_step_ms"] - 1)
    assert sum(map(abs, errors)) / len(errors) < 0.06
