"""Reader for Open MPI: mpirun, mpiexec, prterun."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.variables import from_counts, outer_hosts
from accel_state.topology import Topology


@final
class OpenMPIReader:
    """Reads the OMPI_COMM_WORLD_* variables. Source: Open MPI's documentation, "Environment variables"."""

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if Open MPI's mpirun started this process; otherwise None."""
        if not (env.get("OMPI_COMM_WORLD_RANK") or env.get("OMPI_COMM_WORLD_SIZE")):
            return None
        return from_counts(
            env,
            launcher="openmpi",
            rank_name="OMPI_COMM_WORLD_RANK",
            size_name="OMPI_COMM_WORLD_SIZE",
            local_rank_name="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size_name="OMPI_COMM_WORLD_LOCAL_SIZE",
            hosts=outer_hosts(env),
        )
