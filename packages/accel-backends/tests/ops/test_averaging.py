import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel_backends import average_tensors
from accel_backends.ops.averaging import average_gradients, complete_gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_tensors_become_their_mean_over_ranks(rank, dtype):
    tensors = [torch.full((2, 3), float(rank)).to(dtype), torch.full((), 2.0 * rank).to(dtype)]
    average_tensors(tensors)
    assert torch.equal(tensors[0], torch.full((2, 3), 0.5).to(dtype))
    assert torch.equal(tensors[1], torch.full((), 1.0).to(dtype))


@pytest.mark.ranks(2)
def test_layouts_and_dtypes_may_be_mixed_and_integers_stay(rank):
    transposed = torch.full((3, 2), float(rank)).t()
    tensors = [transposed, torch.tensor([rank]), torch.full((2,), float(rank), dtype=torch.float64)]
    average_tensors(tensors)
    assert float(transposed.mean()) == 0.5
    assert tensors[1].item() == rank
    assert float(tensors[2].mean()) == 0.5


@pytest.mark.ranks(2)
def test_a_sparse_tensor_may_have_other_rows_on_each_rank(rank):
    mine = torch.sparse_coo_tensor([[rank, rank]], torch.full((2, 2), 1.0 + rank), (4, 2))
    average_tensors([mine])
    assert mine.is_sparse
    assert torch.equal(mine.to_dense(), torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))


def used_by(rank, dtype=torch.float64):
    """Parameters with a gradient on both ranks, on rank 0, on rank 1 and on none."""
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(4)]
    for number, ranks in enumerate([(0, 1), (0,), (1,), ()]):
        if rank in ranks:
            parameters[number].grad = torch.full((2,), 2.0 + 2 * rank, dtype=dtype)
    return parameters


def gradients_of(parameters):
    return [None if one.grad is None else one.grad[0].item() for one in parameters]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_become_their_mean_where_one_rank_has_used_a_parameter(rank, dtype):
    parameters = used_by(rank, dtype)
    average_gradients(parameters)
    assert gradients_of(parameters) == [3.0, 1.0, 2.0, None]
    average_gradients([])


@pytest.mark.ranks(2)
def test_gradients_of_other_ranks_are_zeros_where_nothing_is_averaged(rank):
    parameters = used_by(rank)
    complete_gradients(parameters)
    assert gradients_of(parameters) == [2.0 + 2 * rank, 2.0 * (rank == 0), 4.0 * (rank == 1), None]
    complete_gradients([])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("exchange", [average_gradients, complete_gradients])
def test_a_rank_with_all_gradients_reads_nothing_from_its_device(rank, exchange):
    class Reads(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.found = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default):
                self.found.append(str(func))
            return func(*args, **(kwargs or {}))

    parameters = used_by(rank)[: 2 - rank]
    if rank == 1:
        parameters.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    with Reads() as reads:
        exchange(parameters)
    assert bool(reads.found) == (rank == 1)
