"""The launcher that started this process, found by an ordered list of readers."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain

from accel_state.topology import ClusterReader, Topology

# Order matters: a launcher that runs inside another's allocation inherits its variables. torchrun may run under
# anything; jsrun also sets Open MPI's variables; mpirun reaches other nodes through srun, so Slurm comes after MPI.
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
    """The answer of the first reader that recognises ``env``; a single process when none does.

    Readers of other packages are looked up only when no built-in one answered.
    """
    for reader in chain(built_in_readers(), installed_readers()):
        topology = reader.read(env)
        if topology is not None:
            return topology
    from accel_state.clusters.single import read_single

    return read_single(env)


def built_in_readers() -> Iterator[ClusterReader]:
    """The readers of this package, in order of precedence, each imported when its turn comes."""
    for module, name in BUILT_IN.items():
        yield getattr(import_module(f"{__name__}.{module}"), name)()


def installed_readers() -> Iterator[ClusterReader]:
    """The readers that other packages installed, in order of their names."""
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        if not entry.value.startswith(f"{__name__}."):
            yield entry.load()()
