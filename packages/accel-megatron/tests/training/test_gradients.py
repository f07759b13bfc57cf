"""Gradients of Megatron-LM runs between backward and step. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

EXPERTS = {"expert_model_parallel_size": 2}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("llama", {}, {"tp_degree": 2}),
        ("mixtral", {}, EXPERTS),
        pytest.param("llama", {}, {"pp_degree": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {}, {}, marks=pytest.mark.slow),
        pytest.param("llama", {"tp_degree": 2}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, {"pp_degree": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_an_open_window_continues_with_other_degrees(rank, tmp_path, kind, before, after):
    from loops import largest_difference, make_model, optimizer_of, samples, trained

    def replicas(options):
        return 1 if {"tp_degree", "pp_degree"} & options.keys() else 2

    expected = make_model(kind)
    optimizer = optimizer_of(expected, "sgd")
    for step, options in enumerate((before, after)):
        for replica in range(replicas(options)):
            (expected(**samples(replica, step)).loss / 2 / replicas(options)).backward()
    optimizer.step()

    def run(options, step, **files):
        replica = rank % replicas(options)
        window = {"gradient_accumulation_steps": 2, **options}
        return trained(window, [step], kind=kind, optimizer="sgd", replica=replica, **files)

    run(before, 0, save=tmp_path / "saved")
    assert largest_difference(run(after, 1, load=tmp_path / "saved"), expected.state_dict()) < 1e-6


@pytest.mark.ranks(2)
def test_an_open_window_of_the_same_degrees_is_restored_to_the_bit(rank):
    from loops import accelerator, largest_difference, open_window

    with accelerator(gradient_accumulation_steps=2) as one:
        _, held, again = open_window(one, "llama")
        assert any(value.abs().max() > 0 for value in held.values())
        assert largest_difference(again, held) == 0


@pytest.mark.ranks(1)
def test_norms_are_on_the_device_of_the_model_where_a_stage_has_no_gradients(rank):
    import torch
    from loops import accelerator
    from megatron.core import parallel_state

    from accel_megatron.training.gathering import norm_over_ranks

    with accelerator():
        norm = norm_over_ranks([], parallel_state.get_model_parallel_group(), torch.device("meta"))
        assert norm.device.type == "meta"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_without_the_loss_scale_are_refused_by_name(rank, sharded):
    from loops import accelerator, make_model, optimizer_of, samples

    from accel_state.errors import BackendError

    with accelerator(mixed_precision="fp16", use_distributed_optimizer=sharded) as one:
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        model(**samples(0, 0)).loss.backward()
        refused = r"gradients of AdamW \((model|lm_head)\.[\w.]+, .*\) are of a loss without"
        with pytest.raises(BackendError, match=refused):
            one.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(BackendError, match=refused):
            optimizer.step()
