"""Megatron-LM on a GPU, without the stand-in for CUDA: the ordinary loop equals one process on the CPU."""

from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks(1),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 1e-3), ("fp16", 2e-4)])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "bert", "t5"])
def test_one_gpu_trains_as_one_process(rank, kind, precision, tolerance):
    from loops import largest_difference, make_model, optimizer_of, reference, samples

    from accel import Accelerator
    from accel_megatron import MegatronLMPlugin

    strategy = MegatronLMPlugin(num_micro_batches=2, gradient_clipping=0.5)
    one = Accelerator(strategy=strategy, mixed_precision=precision)
    expected = make_model(kind)
    losses = reference(expected, 1, kind="sgd", clip=0.5, precision=precision, batches=kind)
    source = make_model(kind)
    model, optimizer = one.prepare(source, optimizer_of(source, "sgd"))
    found = []
    for step in range(3):
        batch = {name: value.to(one.device) for name, value in samples(0, step, kind=kind).items()}
        loss = model(**batch).loss
        found.append(float(loss.detach()))
        one.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in one.get_state_dict(model).items()}
    one.end_training()
    assert found == pytest.approx(losses, abs=tolerance)
    assert largest_difference(weights, expected.state_dict()) < tolerance
