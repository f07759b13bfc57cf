"""Ranks that call a model in different ways, or fail where others wait for their tokens, raise errors that say so."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel_state import ParallelismConfig
from accel_state.errors import CollectiveError, CollectiveMismatchError
from accel_state.watchdog.decorator import explain

from .pipelines import accelerator_of, llama, loader, mixtral, optimizer_of

pytestmark = pytest.mark.timeout(300)
WITHIN = 25
"""Seconds within which all ranks have an error; collectives would wait for minutes."""


def prepared(degrees: Mapping[str, int]) -> tuple[Accelerator, Any]:
    if "pp_size" in degrees:
        accelerator = accelerator_of(degrees, {})
    else:
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**degrees))
    model: nn.Module = (mixtral if "ep_size" in degrees else llama)().double()
    return accelerator, accelerator.prepare(model, optimizer_of(model))[0]


def batch() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = next(iter(loader()))
    del found["attention_mask"]
    return found


def assert_errors(model: Any, given: Mapping[str, torch.Tensor], words: str, *, trains: bool) -> None:
    begin = monotonic()
    with pytest.raises((CollectiveMismatchError, CollectiveError), match=words):
        called(model, given, trains=trains)
    assert monotonic() - begin < WITHIN


def called(model: Any, given: Mapping[str, torch.Tensor], *, trains: bool) -> None:
    """A call, whose broken connection is explained as it is where a program ends of it."""
    try:
        with torch.set_grad_enabled(trains):
            loss = model(**given).loss
            if trains:
                loss.backward()
    except RuntimeError as error:
        explain(error)
        raise


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "axis",
    ["pp_size", *(pytest.param(f"{axis}_size", marks=pytest.mark.slow) for axis in ("cp", "sp", "ep", "tp"))],
)
@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_rank_without_gradients(rank: int, axis: str, culprit: int) -> None:
    _, model = prepared({axis: 2})
    assert model(**batch()).loss.isfinite()
    words = rf"with gradients.* on ranks {1 - culprit}.*ranks 0, 1 make this call together; nearest: the same on all"
    assert_errors(model, batch(), rf"(?s){words}|under torch.no_grad\(\).* on ranks {culprit}", trains=rank != culprit)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axis", [pytest.param(one, marks=pytest.mark.slow) for one in ("cp_size", "sp_size")])
def test_an_evaluation_with_labels_on_some_ranks_of_a_context_group(rank: int, axis: str) -> None:
    _, model = prepared({"pp_size": 2, axis: 2})
    model.eval()
    given = batch()
    with torch.no_grad():
        assert model(**given).loss.isfinite()
        if rank % 2:  # the pipelines of the two ranks of each context group
            del given["labels"]
    words = "with labels on ranks [02].*without labels on ranks [13]"  # of those that have begun the call
    assert_errors(model, given, rf"{words}|without labels on ranks [13].*with labels on ranks [02]", trains=False)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_an_error_within_the_experts_of_one_rank(rank: int, kind: type[Exception]) -> None:
    accelerator, model = prepared({"pp_size": 2, "ep_size": 2})
    assert model(**batch()).loss.isfinite()
    if rank == 2:

        def fail(*_: Any) -> None:
            raise kind("no room for experts")

        accelerator.unwrap_model(model).model.layers[-1].mlp.experts.register_forward_pre_hook(fail)
    begin = monotonic()
    with pytest.raises(kind if rank == 2 else CollectiveError, match="no room for experts"):
        model(**batch())
    assert monotonic() - begin < WITHIN
