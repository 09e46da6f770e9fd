"""README, docs and tutorials: blocks do what is shown, the prose is easy to read, and questions are answered."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintsched.runtime import load_job, plan_of

from .readability import median_length, reading_ease, sentences
from .tutorials import ROOT, TUTORIALS, blocks, command_server, is_like, run_page, run_session, write_files

README = ROOT / "README.md"
PAGES = sorted(TUTORIALS.glob("*.md"))
LAST_LINES = {
    "train-your-model": ("epoch 3/3", 8),
    "fine-tune-hugging-face": ("epoch 4", 3),
    "pretrain-a-small-language-model": ("step 120/120", 2),
    "write-a-schedule": ("step 10/10", 2),
}
"""The last line of a page's runs, and how many runs have it: all with one loss, whatever the mesh."""
ROUNDING = 0.02
"""Relative difference of a loss from what a page shows: other machines round otherwise."""


def name_of(page: Path) -> str:
    return page.stem


def require_what_it_imports(page: Path) -> None:
    """Skip a page that needs transformers where these are missing, or do not fit this torch."""
    if "from transformers" in page.read_text(encoding="utf-8"):
        try:
            import transformers

            assert transformers.LlamaForCausalLM
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"needs transformers: {error}".splitlines()[0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_a_tutorial_does_what_is_shown(page: Path, tmp_path: Path) -> None:
    require_what_it_imports(page)
    everything = ""
    for shown, printed in run_page(page, tmp_path):
        assert is_like(shown, printed, ROUNDING), f"shown:\n{shown}\nprinted:\n{printed}"
        everything += printed
    line, runs = LAST_LINES.get(page.stem, ("never", 0))
    losses = [float(loss) for loss in re.findall(rf"^{line}  loss ([\d.]+)", everything, re.MULTILINE)]
    assert len(losses) == runs
    assert losses == pytest.approx(losses[:1] * runs, abs=2e-4)


@pytest.mark.slow
@pytest.mark.processes
def test_the_lines_of_the_readme_train(tmp_path: Path) -> None:
    write_files(README, tmp_path)
    (session,) = (block.text for block in blocks(README) if block.text.startswith("$ torchrun"))
    assert is_like(session, run_session(session, tmp_path), ROUNDING)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Shell code by which a session asks one process for each command."""
    with command_server(tmp_path_factory.mktemp("served")) as prelude:
        yield prelude


@pytest.mark.processes
@pytest.mark.parametrize("searches", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_readme_and_docs_show_what_their_commands_print(searches: bool, served: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    pages = [README, *sorted((ROOT / "docs").glob("*.md"))]
    shown = [page for page in pages if (page.stem in ("prediction", "solver")) == searches]
    texts = [block.text for page in shown for block in blocks(page)]
    sessions = [text for text in texts if text.startswith("$ ") and "torchrun" not in text]
    assert len(sessions) >= 5
    for session in sessions:
        assert run_session(session, tmp_path, served) == session


@pytest.mark.processes
def test_planning_an_own_schedule_shows_what_is_printed(served: str, tmp_path: Path) -> None:
    """By the planner alone, every day; the docs have the commands of the other page of the planner."""
    page = TUTORIALS / "write-a-schedule.md"
    write_files(page, tmp_path)
    sessions = [block.text for block in blocks(page) if block.text.startswith("$ quintsched")]
    session = "".join(text for text in sessions if "quintsched run" not in text)
    assert is_like(session, run_session(session, tmp_path, served))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_tutorials_are_what_they_are_called(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in write_files(page, tmp_path):
        if name.endswith(".py"):
            compile(Path(name).read_text(encoding="utf-8"), name, "exec")
        else:
            assert plan_of(load_job(Path(name))).check().sound


@pytest.mark.parametrize("page", [README, *PAGES, *sorted((ROOT / "docs").glob("*.md"))], ids=name_of)
def test_prose_is_easy_to_read(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert reading_ease(text) >= 50
    assert median_length(text) <= 18
    avoided = r"\b(?:is|are) (?:said|told)\b|\bstands?\b|\blies\b|\bwhoever\b|\bfor nobody\b"
    assert not re.findall(avoided, " ".join(" ".join(words) for words in sentences(text)))


QUESTIONS = {
    "maximum number of steps": "max_steps",
    "my own optimizer": "optimizer=",
    "fewer GPUs": "mesh",
    "tokens per second": "tokens/s",
    "read a verdict": "verdict",
    "padded batches": "-100",
    "whether my model fits": "DOES NOT FIT",
    "write a schedule": "@qs.schedule",
    "two machines": "--nnodes 2",
    "exit code 3": "| 3 |",
}
"""Questions, as the README asks them, and what has to be in the section that it leads to."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_answered_where_the_readme_leads(question: str) -> None:
    (row,) = (
        line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and question in line
    )
    answers = [section(ROOT / path, anchor) for path, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", row)]
    assert any(QUESTIONS[question] in answer for answer in answers)


def section(page: Path, anchor: str) -> str:
    """Return the section of a page that an anchor names; without one, all of it."""
    text = page.read_text(encoding="utf-8")
    for part in re.split(r"^(?=##+ )", text, flags=re.MULTILINE) if anchor else ():
        heading = part.partition("\n")[0].lstrip("# ").lower()
        if re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") == anchor:
            return part
    return "" if anchor else text
