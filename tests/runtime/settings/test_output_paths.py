"""Places of a job: text that only looks like a path or a URL is refused before anything is made or removed there."""

import pytest

import quintsched as qs
from quintsched.runtime import run_local
from quintsched.runtime.comm import Transport
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.saving.checkpoints.bucket_folder import BucketFolder, named_place, open_place
from quintsched.runtime.settings.job_file import JobConfig


def test_patterns_are_no_names_of_objects() -> None:
    for name in ("a*", "lr[0]", "a?b", "a#1", "a::b", "a//b", "a/../b", "a/.", "a\nb", "a\x7f"):
        for read in (named_place, lambda url: JobConfig(checkpoint={"dir": url})):
            with pytest.raises(qs.UsageError, match="to clients of buckets it is no plain name"):
                read(f"s3://bucket/{name}")
    with pytest.raises(qs.UsageError, match=r"\As3://bucket/.*: a URL of checkpoints has no .* no plain name\Z"):
        BucketFolder("s3://bucket/a*", "")


def test_what_only_looks_like_a_url_makes_no_folder_which_may_have_any_name() -> None:
    for text in ("file:///runs/1", "S3://runs/1", "s3:/runs/1", "simplecache::s3://runs/1", "s3://", "s3:///"):
        for section, key in (("checkpoint", "dir"), ("checkpoint", "export"), ("log", "path"), ("runtime", "trace")):
            with pytest.raises(qs.UsageError, match=f"/{section}/{key}: .* it is no path on a disk, nor a URL such as"):
                JobConfig(**{section: {key: text}})
    for text in ("out/a*b", "12:30/run", "a:b", "C:/out", "out//x", "../out [1]"):
        assert JobConfig(checkpoint={"dir": text}).checkpoint.folder is not None
    with pytest.raises(qs.UsageError, match=r"nowhere://runs/1: .*nowhere"):
        open_place("nowhere://runs/1")


def test_all_ranks_refuse_a_place_alike() -> None:
    """Other ranks have the nearest class that `quintsched.errors` knows."""

    def refused(transport: Transport, place: str) -> str:
        with pytest.raises(qs.UsageError) as found:
            ControlGroup(transport.world_group()).together(lambda: named_place(place))
        return str(found.value)

    for places in (("s3:///", "s3:///"), ("s3:///", "a"), ("a", "s3:///")):
        said = run_local(2, lambda transport, places=places: refused(transport, places[transport.rank]))
        assert said[0] == said[1]
