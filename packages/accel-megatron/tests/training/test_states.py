"""Checkpoints of Megatron-LM runs: loaded with other degrees. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

LAYOUTS = [
    ({"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}),
    ({"pp_degree": 2}, {"use_distributed_optimizer": True}),
    ({"use_distributed_optimizer": True}, {"tp_degree": 2, "sequence_parallelism": True}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        *((*layout, "llama") for layout in LAYOUTS),
        ({"pp_degree": 2}, {"tp_degree": 2}, "bert"),
        pytest.param({"pp_degree": 2}, {"tp_degree": 2}, "llama tied", marks=pytest.mark.slow),
        ({"use_distributed_optimizer": True}, {"tp_degree": 2}, "t5"),
    ],
)
@pytest.mark.sampled(2)
def test_a_checkpoint_continues_with_other_degrees(rank, tmp_path, before, after, kind):
    from loops import largest_difference, trained

    expected = trained(before, range(4), kind=kind)
    trained(before, range(2), kind=kind, save=tmp_path / "saved")
    continued = trained(after, range(2, 4), kind=kind, load=tmp_path / "saved")
    assert largest_difference(continued, expected) < 1e-4
