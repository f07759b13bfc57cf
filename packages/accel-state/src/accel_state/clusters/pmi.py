"""Reader for MPICH and Intel MPI: the mpiexec of hydra and of HPE's PALS, which implement PMI."""

from collections.abc import Mapping
from typing import final

from accel_state.clusters.variables import from_counts, outer_hosts
from accel_state.topology import Topology


@final
class PMIReader:
    """Reads PMI_RANK, PMI_SIZE and hydra's MPI_LOCALRANKID, MPI_LOCALNRANKS, or PALS's PMI_LOCAL_RANK, PMI_LOCAL_SIZE.

    ``srun --mpi=pmi2`` also sets the first two variables, but not the local ones; the Slurm reader handles that case.
    """

    def read(self, env: Mapping[str, str]) -> Topology | None:
        """Returns the topology if hydra or PALS started this process; otherwise None."""
        if not (env.get("PMI_RANK") or env.get("PMI_SIZE")):
            return None
        if env.get("SLURM_PROCID") and not env.get("MPI_LOCALRANKID"):
            return None
        by_pals = env.get("PMI_LOCAL_SIZE") and not env.get("MPI_LOCALNRANKS")
        return from_counts(
            env,
            launcher="pmi",
            rank_name="PMI_RANK",
            size_name="PMI_SIZE",
            local_rank_name="PMI_LOCAL_RANK" if by_pals else "MPI_LOCALRANKID",
            local_size_name="PMI_LOCAL_SIZE" if by_pals else "MPI_LOCALNRANKS",
            hosts=outer_hosts(env),
        )
