"""`quintsched solve` and `certify`."""

import json


def test_a_solved_plan_is_an_ordinary_plan_with_a_certificate(cli, tmp_path):
    plan, certificate, log = tmp_path / "plan.json", tmp_path / "certificate.json", tmp_path / "log.jsonl"
    files = ("-o", plan, "--certificate", certificate, "--log", log)
    found = cli("solve", "--pp", 4, "-m", 8, "--memory-cap", 2, "--placement", "linear", "--effort", 1, *files)
    assert found.code == 0
    assert found.out.startswith("span 41 forward, makespan 41, placement linear")
    assert "optimal, proved by the solver" in found.out
    assert cli("check", plan).code == 0
    assert json.loads(log.read_text().splitlines()[-1])["value"] == 41
    told = cli("certify", plan, certificate)
    assert (told.code, told.out.startswith("certified: span 41, at least 37 (rank 0 by memory)")) == (0, True)
    certificate.write_text(certificate.read_text().replace('"bound": 37.0', '"bound": 38.0'))
    told = cli("certify", plan, certificate)
    assert (told.code, "proves 37 only" in told.err) == (1, True)
    certificate.write_text("{}")
    assert cli("certify", plan, certificate).code == 1


def test_stages_that_recompute_and_offloading_are_named(cli):
    sizes = ("solve", "--pp", 4, "-m", 8, "--memory-cap", 2, "--placement", "linear", "--effort", 1)
    assert "placement linear, recomputing stage 0, stage 1, found by" in cli(*sizes, "--recompute", "1,1,0,0").out
    found = cli(*sizes, "--recompute", "all", "--offload", "--json")
    assert json.loads(found.out).keys() >= {"recompute", "offloads"}
    for wrong, why in (
        ("1,1,0", "recompute has 3 values, but there are 4 stages"),
        ("1,2,0,0", "give none, all, auto"),
    ):
        told = cli(*sizes, "--recompute", wrong)
        assert (told.code, why in told.err) == (2 if "give" in why else 1, True)


def test_json_and_wrong_requests(cli):
    found = cli("solve", "--pp", 2, "-m", 4, "--effort", 1, "--json")
    data = json.loads(found.out)
    assert data["status"] == "certified"
    assert data.keys() >= {"makespan", "span", "bound", "gap", "seconds"}
    told = cli("solve", "--pp", 2, "-m", 4, "--memory-cap", 0.5)
    assert (told.code, "the smallest that works: 1" in told.err) == (2, True)
    told = cli("solve", "--pp", 2, "-m", 4, "--memory-cap", "2,x")
    assert (told.code, "one for each rank: 4,3,3,2" in told.err) == (2, True)
    assert json.loads(cli("solve", "--pp", 2, "-m", 4, "--memory-cap", "2,1", "--effort", 1, "--json").out)["bound"] > 0
    assert cli("solve", "--pp", 2, "-m", 4, "--objective", "period").code == 2
    for files, why in (
        (("-o", "none/plan.json"), "none/plan.json: cannot write the result: No such file"),
        (("-o", "plan.json", "--log", "./plan.json"), "give each its own"),
    ):
        told = cli("solve", "--pp", 2, "-m", 4, *files)
        assert (told.code, why in told.err) == (2, True)
