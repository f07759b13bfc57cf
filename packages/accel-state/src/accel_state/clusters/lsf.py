"""Reader for LSF: jsrun of IBM's Job Step Manager."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.hosts import lsf_hosts
from accel_state.clusters.variables import from_counts
from accel_state.topology import Topology


@final
class LSFReader:
    """Reads the JSM_NAMESPACE_* variables; a plain bsub without jsrun is a single process."""

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if jsrun started this process; otherwise None."""
        if not (env.get("JSM_NAMESPACE_RANK") or env.get("JSM_NAMESPACE_SIZE")):
            return None
        return from_counts(
            env,
            launcher="lsf",
            rank_name="JSM_NAMESPACE_RANK",
            size_name="JSM_NAMESPACE_SIZE",
            local_rank_name="JSM_NAMESPACE_LOCAL_RANK",
            local_size_name="JSM_NAMESPACE_LOCAL_SIZE",
            hosts=lsf_hosts(env),
        )
