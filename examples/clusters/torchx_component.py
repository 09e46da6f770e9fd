"""A component of TorchX that runs a job file by torchrun, on any scheduler that TorchX has.

    pip install '.[examples]' torchx
    torchx run --scheduler local_cwd examples/clusters/torchx_component.py:train --job my_job.yaml --j 2x2 -- A.B=C …

A run that is submitted again goes on from its newest checkpoint. Where the scheduler has no retries of its own
(local_cwd has none), torchrun starts the ranks of all nodes again after a failure.
"""

from typing import Optional

import torchx
from torchx import specs
from torchx.components import dist


def train(
    *settings: str,
    job: str,
    j: str = "2x2",
    h: Optional[str] = None,  # noqa: UP045, as TorchX reads the source
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 4096,
    image: str = torchx.IMAGE,
    restarts: int = 3,
    retries: int = 0,
    port: int = 29500,
) -> specs.AppDef:
    """Run a job file of quintsched.

    Args:
        settings: settings of the job that differ, as A.B=C
        job: the job file, as the nodes see it
        j: [fewest nodes:]nodes x ranks of each; fewer nodes need parallel.elastic=true
        h: a named resource, in place of cpu, gpu and memMB
        cpu: processors of a node
        gpu: devices of a node
        memMB: memory of a node
        image: image with quintsched, where the scheduler runs images
        restarts: restarts by torchrun, without leaving the nodes
        retries: retries by the scheduler
        port: a free port of the first node
    """
    return dist.ddp(
        *("--resume", "--config", job, *(word for setting in settings for word in ("--set", setting))),
        m="quintsched.runtime",
        name="quintsched/run",
        image=image,
        j=j,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        rdzv_port=port,
        max_retries=retries,
        env={"PET_MAX_RESTARTS": str(restarts), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
