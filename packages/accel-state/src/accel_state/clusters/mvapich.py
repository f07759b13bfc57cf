"""Reader for MVAPICH: mpirun_rsh and its mpiexec."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.variables import from_counts, outer_hosts
from accel_state.topology import Topology


@final
class MVAPICHReader:
    """Reads the MV2_COMM_WORLD_* variables (MVP_COMM_WORLD_* since MVAPICH 3). Source: MVAPICH user guide."""

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if MVAPICH started this process; otherwise None."""
        for prefix in ("MV2_COMM_WORLD_", "MVP_COMM_WORLD_"):
            if env.get(prefix + "RANK") or env.get(prefix + "SIZE"):
                return from_counts(
                    env,
                    launcher="mvapich",
                    rank_name=prefix + "RANK",
                    size_name=prefix + "SIZE",
                    local_rank_name=prefix + "LOCAL_RANK",
                    local_size_name=prefix + "LOCAL_SIZE",
                    hosts=outer_hosts(env),
                )
        return None
