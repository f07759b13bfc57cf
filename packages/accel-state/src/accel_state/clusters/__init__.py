"""Readers of launchers' environment variables, tried in a fixed order."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain

from accel_state.topology import ClusterReader, Topology

# Order matters because a launcher inside another launcher's allocation inherits its variables. torchrun may run under
# any launcher; jsrun also sets Open MPI's variables; mpirun reaches other nodes through srun, so MPI comes before
# Slurm.
BUILT_IN = {
    "torchrun": "TorchrunReader",
    "kubernetes": "KubernetesReader",
    "lsf": "LSFReader",
    "openmpi": "OpenMPIReader",
    "mvapich": "MVAPICHReader",
    "pmi": "PMIReader",
    "slurm": "SlurmReader",
    "tpu": "TPUPodReader",
}
ENTRY_POINT_GROUP = "accel.clusters"


def read_environment(env: Mapping[str, str]) -> Topology:
    """Returns the topology of the first reader that recognises ``env``; a single process if no reader does.

    Readers of other packages are imported only if no built-in reader recognises ``env``.
    """
    for reader in chain(built_in_readers(), installed_readers()):
        topology = reader.read(env)
        if topology is not None:
            return topology
    from accel_state.clusters.single import read_single

    return read_single(env)


def built_in_readers() -> Iterator[ClusterReader]:
    """Yields the readers of this package in order of precedence, each imported when it is reached."""
    for module, name in BUILT_IN.items():
        yield getattr(import_module(f"{__name__}.{module}"), name)()


def installed_readers() -> Iterator[ClusterReader]:
    """Yields the readers that other packages installed, sorted by entry-point name."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        if not entry.value.startswith(f"{__name__}."):
            yield entry.load()()
