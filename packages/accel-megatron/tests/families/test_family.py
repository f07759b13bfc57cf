"""Models of each family train with Megatron-LM as in one process. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["bert words", "megatron bert", "t5", "t5 gated"])
def test_one_rank_trains_as_one_process(rank, kind):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, num_micro_batches=2, clip=0.5, accumulation=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["bert", "megatron bert", "t5", "t5 gated"])
@pytest.mark.parametrize("sequence", [False, True])
def test_two_tensor_parallel_ranks_train_as_one_process(rank, kind, sequence):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, tp_degree=2, sequence_parallelism=sequence, clip=0.5, optimizer="sgd")
