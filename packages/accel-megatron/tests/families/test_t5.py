"""T5 trains with Megatron-LM as in one process. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.ranks(2)
def test_evaluation_returns_the_logits_of_the_decoder(rank):
    import torch
    from loops import accelerator, make_model, samples

    with accelerator(tp_degree=2) as one, torch.no_grad():
        batch = samples(0, 0, kind="t5")
        expected = make_model("t5").eval()(**batch)
        found = one.prepare(make_model("t5")).eval()(**batch)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
        assert torch.allclose(found.logits, expected.logits, atol=1e-5)


@pytest.mark.ranks(2)
def test_what_cannot_be_computed_is_refused_by_name(rank):
    from loops import accelerator, make_model, samples

    from accel_state.errors import BackendError, PrepareError

    with accelerator(pp_degree=2) as one, pytest.raises(PrepareError, match=r"pp_degree=2: .*nearest: pp_degree=1"):
        one.prepare(make_model("t5"))
    with accelerator(tp_degree=2, sequence_parallelism=True) as one:
        dropping = make_model("t5")
        dropping.config.dropout_rate = 0.1
        with pytest.raises(PrepareError, match=r"attention_dropout: .*nearest: dropout_rate=0\.0"):
            one.prepare(dropping)
        model = one.prepare(make_model("t5"))
        batch = samples(0, 0, kind="t5")
        batch["labels"] = batch["labels"][:, :-1]
        with pytest.raises(BackendError, match="sequences of 7 tokens are not divisible by tp_degree=2"):
            model(**batch)
        with pytest.raises(BackendError, match="needs labels or decoder_input_ids"):
            model.eval()(input_ids=batch["input_ids"])
