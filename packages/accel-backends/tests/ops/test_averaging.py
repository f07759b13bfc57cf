import pytest
import torch

from accel_backends import average_tensors


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
