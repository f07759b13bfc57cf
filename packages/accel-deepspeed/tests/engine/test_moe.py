"""Models with experts: which of them have state dicts, and schedulers of their param groups."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from accel_deepspeed.engine.moe import check_experts_are_alike, check_scheduled
from accel_deepspeed.library import library
from accel_state.errors import BackendError, PrepareError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(autouse=True)
def imported() -> None:
    """DeepSpeed, imported as a backend on the CPU does."""
    library("cpu")


class Block(nn.Module):
    """A user's module around experts, with an attribute of its own by the name of one of DeepSpeed's."""

    def __init__(self, ep_size: object) -> None:
        super().__init__()
        from deepspeed.moe.experts import Experts

        self.ep_size, self.experts = ep_size, Experts(nn.Linear(3, 3), 2, "ep_size_1")


@pytest.mark.parametrize("ep_size", [None, 4, "by rank"])
def test_the_ep_size_of_a_users_module_is_not_that_of_experts(ep_size: object) -> None:
    check_experts_are_alike(Block(ep_size))


@pytest.mark.parametrize("ep_size", [1, 2])
def test_layers_whose_ranks_have_experts_of_their_own_have_no_state_dict(ep_size: int) -> None:
    from deepspeed.moe.layer import MoE

    layer = MoE(3, nn.Linear(3, 3), num_experts=2, ep_size=ep_size)
    if ep_size == 1:
        check_experts_are_alike(layer)
        return
    with pytest.raises(BackendError, match=r"\(expert parallelism, ep_size=2\), which no state tells apart"):
        check_experts_are_alike(layer)


def test_a_scheduler_of_a_group_that_has_to_be_split_is_refused() -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    layer = MoE(3, nn.Linear(3, 3), num_experts=2)
    together = torch.optim.AdamW(layer.parameters())
    check_scheduled([together], [])
    with pytest.raises(PrepareError, match=r"StepLR drives a param group of experts .* split it by deepspeed\.moe"):
        check_scheduled([together], [torch.optim.lr_scheduler.StepLR(together, 1)])
    groups = split({"params": list(layer.parameters()), "name": "all"})
    apart = torch.optim.AdamW([group for group in groups if group["params"]])
    check_scheduled([apart], [torch.optim.lr_scheduler.StepLR(apart, 1)])
