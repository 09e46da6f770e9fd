"""Places of a job: text that only looks like a path or a URL is refused before anything is made or removed there."""

from __future__ import annotations

import pytest

import quintsched as qs
from quintsched.runtime import run_local
from quintsched.runtime.comm import Transport
from quintsched.runtime.comm.host_collectives import ControlGroup
from quintsched.runtime.saving.checkpoints.bucket_folder import named_place


def test_all_ranks_refuse_a_place_alike() -> None:
    """Other ranks have the nearest class that `quintsched.errors` knows."""

    def refused(transport: Transport, place: str) -> str:
        with pytest.raises(qs.UsageError) as found:
            ControlGroup(transport.world_group()).together(lambda: named_place(place))
        return str(found.value)

    for places in (("s3:///", "s3:///"), ("s3:///", "a"), ("a", "s3:///")):
        said = run_local(2, lambda transport, places=places: refused(transport, places[transport.rank]))
        assert said[0] == said[1]
