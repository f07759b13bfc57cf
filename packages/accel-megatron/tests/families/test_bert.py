"""BERT trains with Megatron-LM as in one process. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

KINDS = ["bert", "megatron bert"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [*KINDS, "megatron bert words"])
@pytest.mark.sampled(1)
def test_two_stages_train_as_one_process(rank, kind):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, pp_degree=2, num_micro_batches=2, clip=0.5, optimizer="sgd")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["bert", pytest.param("megatron bert", marks=pytest.mark.slow)])
def test_two_stages_of_two_tensor_parallel_ranks_train_as_one_process(rank, kind):
    from loops import assert_trains_as_one_process

    options = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2, "sequence_parallelism": True}
    assert_trains_as_one_process(kind, accumulation=2, clip=0.5, optimizer="sgd", **options)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["bert words", "bert"])
def test_labels_of_pairs_belong_to_the_head_of_pairs(rank, kind):
    from loops import accelerator, make_model, samples

    from accel_state.errors import BackendError

    with accelerator() as one:
        model = one.prepare(make_model(kind))
        batch = samples(0, 0, kind="bert" if kind == "bert words" else "bert words")
        with pytest.raises(BackendError, match="next_sentence_label belongs to labels"):
            model(**batch)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tp_degree", "pp_degree"])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_returns_the_logits_of_words_and_of_pairs(rank, axis, kind):
    import torch
    from loops import accelerator, make_model, samples

    with accelerator(**{axis: 2}) as one, torch.no_grad():
        batch = samples(0, 0, kind=kind)
        expected = make_model(kind).eval()(**batch)
        found = one.prepare(make_model(kind)).eval()(**batch)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
        for name in ("prediction_logits", "seq_relationship_logits"):
            assert torch.allclose(found[name], expected[name], atol=1e-5), name
