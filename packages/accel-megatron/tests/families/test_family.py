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
@pytest.mark.sampled(4)
def test_two_tensor_parallel_ranks_train_as_one_process(rank, kind, sequence):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, tp_degree=2, sequence_parallelism=sequence, clip=0.5, optimizer="sgd")


@pytest.mark.ranks(1)
def test_a_row_of_several_sequences_is_refused(rank):
    """Packed rows, which Transformers keeps apart; positions behind padding on the left are those of one sequence."""
    import torch
    from loops import accelerator, make_model, samples

    from accel_state.errors import BackendError

    given = samples(0, 0)
    ids = given["input_ids"]
    places = torch.arange(ids.shape[1])
    padded = (places > 1).long().expand(len(ids), -1)
    with accelerator() as one, torch.no_grad():
        model = one.prepare(make_model("llama")).eval()
        expected = make_model("llama").eval()(ids, attention_mask=padded, position_ids=(places - 2).clamp(0)[None])
        found = model(input_ids=ids, attention_mask=padded, position_ids=(places - 2).clamp(0)[None])
        assert torch.allclose(found.logits[:, 2:], expected.logits[:, 2:], atol=1e-5)
        with pytest.raises(BackendError, match=r"of row 0 go from 4 to 0 at token 5: .* one sequence a row"):
            model(input_ids=ids, position_ids=torch.where(places < 5, places, places - 5)[None])
