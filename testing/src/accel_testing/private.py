"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from contextlib import suppress
from importlib import import_module

DYNAMO = "torch._dynamo"
"""Module that every optimizer imports. A torch without it has nothing to import beforehand."""


def drop_mesh_caches() -> None:
    """Drops torch's caches of sharding decisions and redistribution plans of DTensors; those that this torch has."""
    for module, *path in (
        ("debug", "_clear_sharding_prop_cache"),
        # torch 2.9 has no function for it.
        ("_api", "DTensor", "_op_dispatcher", "sharding_propagator", "propagate_op_sharding", "cache", "cache_clear"),
        ("_redistribute", "clear_redistribute_planner_cache"),
        ("_redistribute", "_gen_transform_infos", "cache_clear"),
        ("_collective_utils", "MeshTopoInfo", "build_from_mesh", "cache_clear"),
    ):
        with suppress(AttributeError, ImportError):
            found: object = import_module(f"torch.distributed.tensor.{module}")
            for name in path:
                found = getattr(found, name)
            if callable(found):
                found()
