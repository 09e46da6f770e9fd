import contextlib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import UsageError
from quintsched.runtime import JobConfig, Transport, load_job, run_local
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.data.data_sources import load_dataset
from quintsched.runtime.models import tied_weights
from quintsched.runtime.saving.checkpoints.bucket_folder import BucketFolder, named_place, open_place
from quintsched.runtime.settings.engine_settings import RunSettings, Settings, read_settings
from quintsched.runtime.settings.job_keys_of_other_frameworks import FOREIGN_KEYS, find_foreign_key


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobConfig]:
    """Load a job from its text, with overrides."""

    def load(text: str, *overrides: str) -> JobConfig:
        path = tmp_path / "job.yaml"
        path.write_text(textwrap.dedent(text))
        return load_job(path, overrides)

    return load


@pytest.fixture
def fault(job) -> Callable[..., str]:
    """Return the message that a broken job is refused with."""

    def refuse(text: str, *overrides: str) -> str:
        with pytest.raises(UsageError) as error:
            job(text, *overrides)
        assert "job.yaml" in str(error.value) or "--set" in str(error.value)
        return str(error.value)

    return refuse


def sections(kind: type[Settings] = JobConfig, path: str = "") -> list[tuple[str, type[Settings]]]:
    """Return every settings class of a job with its path."""
    found = [(path, kind)]
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            found += sections(field.annotation, f"{path}.{name}".strip("."))
    return found


def test_everything_has_a_default(job) -> None:
    assert job("") == job("train:\n") == JobConfig()
    assert JobConfig().data.name == "digits"


def test_a_whole_job(job) -> None:
    config = job(
        """
        model: {name: vit, options: {depth: 4, scale: 1e-2}}
        parallel: {mesh: "dp=2,pp=2,tp=2", schedule: gpipe, microbatches: 4, chunks: 2, bucket_mb: 1}
        train: {clip: 1, optimizer: {name: adamw, lr: 1e-4, weight_decay: 0.01, betas: [0.9, 0.95]}}
        """
    )
    assert config.model.options == {"depth": 4, "scale": 0.01}
    assert (config.train.optimizer.lr, config.train.optimizer.betas) == (1e-4, (0.9, 0.95))
    assert config.train.clip == 1.0
    assert config.parallel.mesh == "dp=2,pp=2,tp=2"


def test_every_setting_is_documented() -> None:
    for path, kind in sections():
        assert kind.__doc__, path
        assert all(field.description for field in kind.model_fields.values()), path


def test_values_of_overrides_are_yaml(job) -> None:
    given = ("train.epochs=5", "train.optimizer.lr=1e-4", "parallel.mesh=dp=2,pp=2", "train.clip=null")
    config = job("train: {epochs: 2}", *given, "model.options.depth=3")
    assert (config.train.epochs, config.train.optimizer.lr, config.parallel.mesh) == (5, 1e-4, "dp=2,pp=2")
    assert config.model.options == {"depth": 3}
    assert config.train.clip is None


def test_wrong_overrides(fault) -> None:
    assert "section.key=value" in fault("", "train.epochs")
    assert "section.key=value" in fault("", "train..epochs=3")
    assert "train.epochs is not a section" in fault("train: {epochs: 2}", "train.epochs.x=3")
    assert "train.epoch: unknown key; did you mean 'epochs'?" in fault("", "train.epoch=3")
    assert "--set train.epochs=[, line 1, column 2:" in fault("", "train.epochs=[")


def test_misspelt_keys(fault) -> None:
    for path, kind in sections():
        for key in kind.model_fields:
            misspelt = f"{path}.{key}x".strip(".")
            assert f"{misspelt}: unknown key; did you mean {key!r}?" in fault("", f"{misspelt}=1")


def test_all_faults_at_once(fault) -> None:
    message = fault("train: {optimizr: 1, epochs: two}\nlogs: {}")
    assert message.count("\n") == 3
    assert "train.optimizr: unknown key; did you mean 'optimizer'?" in message
    assert "train.epochs: input should be a valid integer, not 'two'" in message
    assert "logs: unknown key; did you mean 'log'?" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("checkpoint: {every: 0.5}", "checkpoint.every: 0.5 is no interval; write 50,"),
        ("log: {every: 0}", "log.every: 0 is no interval"),
        ("runtime: {stall_after: soon}", "runtime.stall_after: 'soon' is no number of seconds above 0, and not"),
        ("train: {optimizer: {options: {lr: 1}}}", "train.optimizer: options: lr is a setting of its own; write"),
        (
            "train: {optimizer: {groups: [{params: '*', options: {weight_decay: 1}}]}}",
            "train.optimizer.groups.0: options: weight_decay is a setting of its own",
        ),
        ("train: {optimizer: {lr: -1}}", "train.optimizer.lr: input should be greater than or equal to 0, not -1"),
        ("train: {optimizer: {lr: .nan}}", "train.optimizer.lr: input should be a finite number"),
        ("train: {epochs: yes}", "train.epochs: input should be a valid integer, not True"),
        ("train: {optimizer: {name: adm}}", "train.optimizer.name: there is no 'adm'; did you mean 'adam'?"),
        ("train: {optimizer: {name: adam, momentum: 0.5}}", "train.optimizer: 'adam' has no momentum"),
        ("train: {optimizer: {name: sgd, betas: [0, 0]}}", "train.optimizer: 'sgd' has no betas"),
        ("train: {max_steps: 1e3}", "train.max_steps: is a whole number; write 1000"),
        ("parallel: {microbatches: 1e1}", "microbatches is 10.0; give a whole number: 10"),
        ("parallel: {auto: {wrld: 1}}", "parallel.auto.wrld: unknown key; did you mean 'world'?"),
        ("train: {optimizer: {groups: {params: x}}}", "train.optimizer.groups: is a list: [{params: …}, …], not {"),
        (
            "train: {optimizer: {name: adamW8bit}}",
            "no 'adamW8bit'; did you mean 'adam'?; others are written package.module:Class",
        ),
        ("runtime: {precision: fp16}", "precision: 'fp16' needs a loss scale, which Engine(…, grad_scaler="),
        ("runtime: {precision: 16}", "precision: 16 needs a loss scale, which Engine(…, grad_scaler="),
        ("runtime: {precision: bf16}", "there is no 'bf16'; did you mean 'bfloat16'?"),
        ("parallel: {mesh: fsdp=2}", "unknown axis 'fsdp'; did you mean 'dp', with zero=3"),
        ("parallel: {mesh: ''}", "mesh: '' names no axis"),
        ("train: 3", "train: is a section of settings (key: value), not 3"),
        ("parallel: {mesh: 3}", "parallel.mesh: a mesh is text"),
        ("parallel: {mesh: {dp: 0}}", "parallel.mesh: mesh: axis dp has size 0; give a whole number of at least 1"),
        ("parallel: {bucket_mb: 0}", "parallel.bucket_mb: input should be greater than 0"),
        ("1: 2", "1: keys should be strings"),
    ],
)
def test_wrong_values(fault, text: str, words: str) -> None:
    assert words in fault(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  epochs: 1\n  epochs: 2\n", "job.yaml, line 3, column 3: 'epochs' is given twice"),
        ("train: {}\nlog: {}\ntrain: {}\n", "job.yaml, line 3, column 1: 'train' is given twice"),
        ("train: [\n", "job.yaml, line 2, column 1:"),
        ("train:\n\t epochs: 1\n", "line 2, column 1:"),
        ("a: 1\n---\nb: 2\n", "job.yaml, line 2, column 1:"),
        ("a: !!python/object:os.system x", "job.yaml, line 1, column 4:"),
        ("- 1\n- 2\n", "job.yaml: a job file holds sections (model: …, train: …), not [1, 2]"),
        ("a: 2020-13-45", "job.yaml:\n  a: unknown key"),
        ("a: !!timestamp 2020-13-45", "job.yaml, line 1, column 4: !!timestamp is no plain data"),
        ("a: !!int 2020-13-45", "job.yaml, line 1, column 4: '2020-13-45' is not a !!int"),
        ("a: \x00", "job.yaml: is not YAML"),
        pytest.param("[" * 5000, "job.yaml, line 1, column 66: nested too deeply", id="deep"),
    ],
)
def test_broken_yaml(fault, text: str, words: str) -> None:
    assert words in fault(text)


@settings(deadline=None)
@given(content=st.binary(max_size=60) | st.text("abc:[]{}-&*!'\"\n 0<?,|>%@`", max_size=60).map(str.encode))
def test_any_bytes_are_refused_in_words(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_bytes(content)
    with contextlib.suppress(UsageError):
        load_job(path)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("model: {options: {hiden: 64}}", "model.options.hiden: unknown key; did you mean 'hidden'?"),
        ("model: {name: vitt}", "model.name: there is no model 'vitt'"),
        ("data: {name: text, options: {seqence: 5}}", "data.options.seqence: unknown key; did you mean 'sequence'?"),
        ("data: {name: mnist}", "data.path: 'mnist' needs the directory"),
        ("data: {name: digit}", "data.name: there is no data set 'digit'; did you mean 'digits'"),
        ("data: {name: imagenet}", "data.name: there is no data set 'imagenet'; there is: digits, "),
        ("data: {options: {size: 3}}", "data.options"),
    ],
)
def test_faults_of_options_name_the_file_as_those_of_other_keys_do(job, section: str, words: str) -> None:
    given = job(section, "train.epochs=2")
    with pytest.raises(UsageError, match=rf"job.yaml --set train.epochs=2:\n  {re.escape(words)}"):
        tied_weights(given.model) if section.startswith("model") else load_dataset(given.data)


def test_patterns_are_no_names_of_objects() -> None:
    for name in ("a*", "lr[0]", "a?b", "a#1", "a::b", "a//b", "a/../b", "a/.", "a\nb", "a\x7f"):
        for read in (named_place, lambda url: JobConfig(checkpoint={"dir": url})):
            with pytest.raises(UsageError, match="to clients of buckets it is no plain name"):
                read(f"s3://bucket/{name}")
    with pytest.raises(UsageError, match=r"\As3://bucket/.*: a URL of checkpoints has no .* no plain name\Z"):
        BucketFolder("s3://bucket/a*", "")


def test_what_only_looks_like_a_url_makes_no_folder_which_may_have_any_name() -> None:
    for text in ("file:///runs/1", "S3://runs/1", "s3:/runs/1", "simplecache::s3://runs/1", "s3://", "s3:///"):
        for section, key in (("checkpoint", "dir"), ("checkpoint", "export"), ("log", "path"), ("runtime", "trace")):
            with pytest.raises(UsageError, match=f"/{section}/{key}: .* it is no path on a disk, nor a URL such as"):
                JobConfig(**{section: {key: text}})
    for text in ("out/a*b", "12:30/run", "a:b", "C:/out", "out//x", "../out [1]"):
        assert JobConfig(checkpoint={"dir": text}).checkpoint.folder is not None
    with pytest.raises(UsageError, match=r"nowhere://runs/1: .*nowhere"):
        open_place("nowhere://runs/1")


def test_all_ranks_refuse_a_place_alike() -> None:
    """Other ranks have the nearest class that `quintsched.errors` knows."""

    def refused(transport: Transport, place: str) -> str:
        with pytest.raises(UsageError) as found:
            ControlGroup(transport.world_group()).together(lambda: named_place(place))
        return str(found.value)

    for places in (("s3:///", "s3:///"), ("s3:///", "a"), ("a", "s3:///")):
        said = run_local(2, lambda transport, places=places: refused(transport, places[transport.rank]))
        assert said[0] == said[1]


GUIDE = Path(__file__).parents[3] / "docs" / "guide.md"
WORDS = [(meaning, word) for meaning in FOREIGN_KEYS for word in meaning.theirs.split()]


def refusal(values: dict[str, Any], kind: type[Settings] = JobConfig, prefix: str = "") -> str:
    """Return what settings are refused with, without the line of their source."""
    with pytest.raises(UsageError) as error:
        read_settings(kind, values, "job.yaml", prefix)
    return str(error.value).partition("\n  ")[2]


@pytest.mark.parametrize("section", ["", "train.optimizer"])
def test_every_word_is_understood_at_every_level(section: str) -> None:
    for meaning, word in WORDS:
        values: Any = {"train": {"optimizer": {word: 1}}} if section else {word: 1}
        value = f" ({meaning.value})" if meaning.value else ""
        place = f"{section}.{word}".strip(".")
        assert refusal(values) == f"{place}: unknown key; did you mean {meaning.ours!r}{value}?"


def test_an_engine_names_its_arguments_and_a_job_its_sections() -> None:
    assert refusal({"max_grad_norm": 1.0}, RunSettings) == "max_grad_norm: unknown key; did you mean 'clip'?"
    assert "train." not in refusal({"num_epochs": 1}, RunSettings)
    assert refusal({"lr": 1}) == "lr: unknown key; did you mean 'train.optimizer.lr'?"
    assert refusal({"parallel": {"epochs": 1}}) == "parallel.epochs: unknown key; did you mean 'train.epochs'?"
    assert "data.path" not in refusal({"train": {"path": 1}})  # log has a path, too
    assert find_foreign_key("learning_ratte") is None
    assert refusal({"train": {"epoch": 1}}) == "train.epoch: unknown key; did you mean 'epochs'?"


def test_the_guide_has_the_same_table() -> None:
    rows = [
        f"| {', '.join(f'`{word}`' for word in meaning.theirs.split())} | `{meaning.ours}` | {meaning.value} |"
        for meaning in FOREIGN_KEYS
    ]
    table = "\n".join(["| their word | ours | its value |", "|---|---|---|", *rows, ""])
    assert table in GUIDE.read_text(encoding="utf-8"), f"docs/guide.md needs this table:\n{table}"
