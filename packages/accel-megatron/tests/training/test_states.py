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
@pytest.mark.parametrize(("before", "after"), LAYOUTS)
def test_a_checkpoint_continues_with_other_degrees(rank, tmp_path, before, after):
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    def run(options, steps, *, load=False, save=False):
        with accelerator(**options) as one:
            source = make_model("llama")
            model, optimizer = one.prepare(source, optimizer_of(source))
            if load:
                one.load_state(str(tmp_path / "saved"))
            for step in steps:
                # All replicas train on the same samples, so that their number does not matter.
                one.backward(model(**samples(0, step)).loss)
                optimizer.step()
                optimizer.zero_grad()
            if save:
                one.save_state(str(tmp_path / "saved"))
            return one.get_state_dict(model)

    expected = run(before, range(4))
    run(before, range(2), save=True)
    continued = run(after, range(2, 4), load=True)
    assert largest_difference(continued, expected) < 1e-4
