"""MPICH and Intel MPI: hydra's mpiexec, which speaks PMI."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.variables import from_counts, outer_hosts
from accel_state.topology import Topology


@final
class PMIReader:
    """Reads PMI_RANK, PMI_SIZE and hydra's MPI_LOCALRANKID, MPI_LOCALNRANKS.

    ``srun --mpi=pmi2`` sets the first two as well but not the local ones, which Slurm itself then gives.
    """

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """The topology when hydra started this process."""
        if not (env.get("PMI_RANK") or env.get("PMI_SIZE")):
            return None
        if env.get("SLURM_PROCID") and not env.get("MPI_LOCALRANKID"):
            return None
        return from_counts(
            env,
            launcher="pmi",
            rank_name="PMI_RANK",
            size_name="PMI_SIZE",
            local_rank_name="MPI_LOCALRANKID",
            local_size_name="MPI_LOCALNRANKS",
            hosts=outer_hosts(env),
        )
