"""Gradients of Megatron-LM runs between backward and step. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

EXPERTS = {"expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
SEQUENCES = {"tp_degree": 2, "sequence_parallelism": True}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("llama", {}, {"tp_degree": 2}),
        ("mixtral", {}, EXPERTS),
        ("gpt2", CONTEXT, {}),
        pytest.param("gpt2", {}, CONTEXT, marks=pytest.mark.slow),
        pytest.param("llama", CONTEXT, SEQUENCES, marks=pytest.mark.slow),
        pytest.param("llama", SEQUENCES, CONTEXT, marks=pytest.mark.slow),
        pytest.param("llama", {}, {"pp_degree": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {}, {}, marks=pytest.mark.slow),
        pytest.param("llama", {"tp_degree": 2}, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, {"pp_degree": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", EXPERTS, EXPERTS, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_an_open_window_continues_with_other_degrees(rank, tmp_path, kind, before, after):
    from loops import largest_difference, make_model, optimizer_of, samples, trained

    def replicas(options):
        return 1 if {"tp_degree", "pp_degree", "context_parallel_size"} & options.keys() else 2

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


WINDOWS = [
    ("llama", 2, SEQUENCES),
    ("gpt2", 2, CONTEXT),
    ("gpt2", 4, {**CONTEXT, **SEQUENCES}),
    ("llama", 4, CONTEXT),
    ("mixtral", 4, {**EXPERTS, **SEQUENCES}),
    ("mixtral", 4, {**EXPERTS, **SEQUENCES, "expert_tensor_parallel_size": 2}),
    ("mixtral", 4, {**EXPERTS, **CONTEXT}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, marks=[pytest.mark.ranks(ranks), *([pytest.mark.slow] if number > 1 else [])])
        for number, (kind, ranks, options) in enumerate(WINDOWS)
    ],
)
def test_gradients_of_an_open_window_are_those_of_one_process(rank, kind, options):
    """Before they are averaged over ranks; and again after they have been set as a load sets them."""
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference_gradients, samples

    with accelerator(gradient_accumulation_steps=2, **options) as one:
        shared = options.get("tp_degree", 1) * options.get("context_parallel_size", 1)
        replicas = one.num_processes // shared
        source = make_model(kind)
        model, _ = one.prepare(source, optimizer_of(source))
        with one.accumulate(model):
            one.backward(model(**samples(one.process_index // shared, 0)).loss)
        gradients = reference_gradients(kind, replicas, accumulation=2)
        role = one.backend.gradients
        norm = role.norm_so_far(model.parameters(), [model])
        held = role.unreduced(model)
        assert float(norm) == pytest.approx(float(torch.nn.utils.get_total_norm(held.values())), rel=1e-5)
        assert largest_difference(role.full(model), gradients) < 1e-6
        role.set_unreduced(model, held)
        assert largest_difference(role.unreduced(model), held) < 1e-7
        assert largest_difference(role.full(model), gradients) < 1e-6


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
