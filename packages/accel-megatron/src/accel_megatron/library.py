"""The megatron-core library: import, and its process groups."""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from accel_state.errors import BackendError

if TYPE_CHECKING:
    import torch

    from accel_megatron.config import MegatronConfig

INSTALL = 'from a checkout of accel, pip install "./packages/accel-megatron[megatron]"'
_APART = 100_003  # of the dropout seeds of context-parallel ranks, each of which has tensor-parallel ranks
_MESSAGES = "(Transformer Engine|Apex).*not installed"


def installed() -> bool:
    """Whether megatron-core is installed; does not import it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def require_library() -> None:
    """Imports the parts of ``megatron.core`` that a run uses.

    Raises:
        BackendError: megatron-core is not installed, or cannot be imported.
    """
    if not installed():
        raise BackendError(
            f"strategy 'megatron' needs the package megatron-core, which is not installed: {INSTALL}; nearest without "
            "it: strategy='fsdp', which shards a model over ranks"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _MESSAGES)
            for module in ("models.gpt.gpt_model", "models.bert.bert_model", "models.T5.t5_model", "optimizer"):
                import_module(f"megatron.core.{module}")
    except Exception as error:
        raise BackendError(f"megatron-core is installed and cannot be imported: {error}") from error


def open_groups(options: "MegatronConfig") -> None:
    """Creates Megatron-LM's process groups: tensor-parallel ranks are neighbours, stages are outermost.

    Between them are context-parallel ranks, then data-parallel ones. Of the ranks of a stage, those of one expert are
    neighbours, and then those with other experts.

    Collective: every rank of the group must call this.

    Raises:
        BackendError: the process has such groups already, of which megatron-core holds one set in a process.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise BackendError(
            "this process has Megatron-LM's process groups already, and megatron-core holds one set of them; end the "
            "other run first (accelerator.free_memory() and end_training())"
        )
    parallel_state.initialize_model_parallel(
        options.tp_degree,
        options.pp_degree,
        context_parallel_size=options.context_parallel_size,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=options.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )


def divide_stages(chunks: int | None) -> None:
    """Sets the number of chunks of each stage in megatron-core, for an interleaved schedule; None: no interleaving."""
    from megatron.core import parallel_state

    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)


def seed_tensor_parallel(seed: int, device: "torch.device") -> None:
    """Seeds megatron-core's generators of dropout that differs between ranks of a replica, and no other generator.

    megatron-core keeps their states apart from torch's, so that neither ``set_seed`` nor a checkpoint has them.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed += _APART * parallel_state.get_context_parallel_rank()

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model_parallel_cuda_manual_seed(seed)


def close_groups() -> None:
    """Destroys Megatron-LM's process groups, if there are any."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
