"""Reader for Kubernetes with one process per pod: the training operator's PyTorchJob, and indexed Jobs."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.variables import (
    check_below,
    is_local_address,
    master_address,
    master_port,
    need_int,
    read_int,
)
from accel_state.topology import Topology

INDEX = "JOB_COMPLETION_INDEX"
"""Variable that holds the number of a pod in an indexed Job."""


@final
class KubernetesReader:
    """Reads RANK and WORLD_SIZE of a PyTorchJob pod, or JOB_COMPLETION_INDEX of an indexed Job.

    Kubernetes sets no variable with the number of completions of a Job, so the Job must set ``WORLD_SIZE``;
    ``WORLD_SIZE=1`` declares that its pods are independent single processes.
    """

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if each pod holds one rank; otherwise None."""
        if is_pod_rank(env):
            name = "RANK"
        elif env.get(INDEX) and not env.get("RANK") and read_int(env, "WORLD_SIZE") not in {None, 1}:
            name = INDEX
        else:
            return None
        rank = need_int(env, name, because="WORLD_SIZE")
        world_size = need_int(env, "WORLD_SIZE", because=name)
        check_below(env, name, "WORLD_SIZE")
        return Topology(
            rank=rank,
            world_size=world_size,
            node_rank=rank,
            num_nodes=world_size,
            launcher="kubernetes",
            master_addr=master_address(env, num_nodes=world_size, launcher="kubernetes"),
            master_port=master_port(env),
        )


def is_pod_rank(env: Mapping[str, str]) -> bool:
    """Whether ``RANK`` is the number of a pod: inside Kubernetes, without a local rank.

    In a PyTorchJob only rank 0 has a local master address; another rank with a local address was started by hand.
    """
    inside = env.get("KUBERNETES_SERVICE_HOST") or env.get("PET_NNODES")
    if not inside or not env.get("RANK") or env.get("LOCAL_RANK"):
        return False
    return env["RANK"].strip() == "0" or not is_local_address(env.get("MASTER_ADDR"))
