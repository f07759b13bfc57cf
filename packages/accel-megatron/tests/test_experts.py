"""Mixtures of experts with Megatron-LM equal one process. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def assert_trains_as_one_process(rank, *, optimizer="sgd", accumulation=2, **options):
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference, train

    with accelerator(gradient_accumulation_steps=accumulation, **options) as one:
        shared = options.get("tp_degree", 1) * options.get("context_parallel_size", 1)
        replicas = one.num_processes // (options.get("pp_degree", 1) * shared)
        replica = one.process_index // shared % replicas
        expected = make_model("mixtral")
        losses = reference(expected, replicas, kind=optimizer, accumulation=accumulation, clip=0.5)
        source = make_model("mixtral")
        model, prepared = one.prepare(source, optimizer_of(source, optimizer))
        experts = {name for name, _ in model.named_parameters() if ".local_experts." in name}
        layers = 4 // options.get("pp_degree", 1)
        assert len(experts) == 2 * layers * 4 // options.get("expert_model_parallel_size", 1)
        found = train(one, model, prepared, replica, accumulation=accumulation, clip=0.5)
        if replica == 0:
            assert found == pytest.approx(losses, abs=1e-5)
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5


@pytest.mark.ranks(1)
def test_one_rank_trains_as_one_process(rank):
    assert_trains_as_one_process(rank, num_micro_batches=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_experts_on_two_ranks_train_as_one_process(rank, optimizer):
    assert_trains_as_one_process(rank, expert_model_parallel_size=2, optimizer=optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"pp_degree": 2}, {"use_distributed_optimizer": True, "optimizer": "adamw"}])
@pytest.mark.slow
def test_all_experts_on_each_of_two_ranks_train_as_one_process(rank, options):
    assert_trains_as_one_process(rank, **options)


SPLIT = {"tp_degree": 2, "sequence_parallelism": True, "expert_tensor_parallel_size": 2}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("of_each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_of_tensor_parallel_ranks_train_as_one_process(rank, of_each):
    """Whole experts on neighbouring ranks, which have other tokens of one replica, or experts split as other layers."""
    assert_trains_as_one_process(rank, expert_model_parallel_size=2, **SPLIT | {"expert_tensor_parallel_size": of_each})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True, "optimizer": "adamw"}])
@pytest.mark.slow
def test_split_experts_train_as_one_process(rank, options):
    assert_trains_as_one_process(rank, **SPLIT, **options)


@pytest.mark.ranks(4)
@pytest.mark.slow
def test_a_checkpoint_of_experts_of_tensor_parallel_ranks_continues_with_other_degrees(rank, tmp_path):
    from loops import largest_difference, trained

    whole = {"expert_model_parallel_size": 2, **SPLIT, "expert_tensor_parallel_size": 1}
    others = [{"pp_degree": 2, "expert_model_parallel_size": 2}, {"expert_model_parallel_size": 2, **SPLIT}, SPLIT]
    expected = trained(whole, range(4), kind="mixtral")
    trained(whole, range(2), kind="mixtral", save=tmp_path / "saved")
    for other in others:
        continued = trained(other, range(2, 4), kind="mixtral", load=tmp_path / "saved")
        assert largest_difference(continued, expected) < 1e-4
    trained(others[1], range(2), kind="mixtral", save=tmp_path / "split")
    continued = trained(whole, range(2, 4), kind="mixtral", load=tmp_path / "split")
    assert largest_difference(continued, expected) < 1e-4


@pytest.mark.ranks(2)
def test_degrees_with_which_experts_are_not_trained_are_refused(rank):
    import torch
    from loops import accelerator, make_model, samples

    from accel_state.errors import PrepareError

    sequences = pytest.raises(PrepareError, match="with sequence parallelism only; nearest: sequence_parallelism=True")
    with accelerator(tp_degree=2, expert_tensor_parallel_size=2) as one, sequences:
        one.prepare(make_model("mixtral"))
    nearest = "nearest: expert_tensor_parallel_size=2, or expert_model_parallel_size=2"
    gradients = pytest.raises(PrepareError, match=f"does not add up the gradients of these; {nearest}")
    with accelerator(**SPLIT | {"expert_tensor_parallel_size": 1}) as one, gradients:
        one.prepare(make_model("mixtral"))
    with accelerator(**SPLIT) as one, torch.no_grad():
        batch = samples(0, 0)
        expected = make_model("mixtral").eval()(**batch)
        found = one.prepare(make_model("mixtral")).eval()(**batch)
        kept = batch["attention_mask"] == 1
        assert torch.allclose(found.logits[kept], expected.logits[kept], atol=1e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{"pp_degree": 2, "num_micro_batches": 2}, {}])
@pytest.mark.slow
def test_experts_on_two_of_four_ranks_train_as_one_process(rank, options):
    assert_trains_as_one_process(rank, expert_model_parallel_size=2, **options)


@pytest.mark.ranks(2)
def test_gradients_of_experts_are_those_of_one_process(rank):
    import torch
    from loops import accelerator, largest_difference, open_window, reference_gradients

    with accelerator(gradient_accumulation_steps=2, expert_model_parallel_size=2) as one:
        gradients = reference_gradients("mixtral", 2, accumulation=2)
        model, held, again = open_window(one, "mixtral")
        assert largest_difference(again, held) == 0
        for value in held.values():
            torch.distributed.all_reduce(value)
            value.div_(2)
        assert largest_difference(held, gradients) < 1e-6
        assert largest_difference(one.backend.gradients.full(model), gradients) < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"expert_model_parallel_size": 2}, {"pp_degree": 2}),
        pytest.param({"pp_degree": 2}, {"expert_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_continues_with_other_degrees(rank, tmp_path, before, after):
    from loops import largest_difference, trained

    expected = trained(before, range(4), kind="mixtral")
    trained(before, range(2), kind="mixtral", save=tmp_path / "saved")
    continued = trained(after, range(2, 4), kind="mixtral", load=tmp_path / "saved")
    assert largest_difference(continued, expected) < 1e-4


@pytest.mark.ranks(2)
def test_expert_parallel_ranks_may_have_sequences_of_other_lengths(rank):
    from loops import accelerator, make_model, optimizer_of, samples

    with accelerator(expert_model_parallel_size=2) as one:
        source = make_model("mixtral")
        model, optimizer = one.prepare(source, optimizer_of(source))
        batch = {name: value[:, : 12 - 4 * one.process_index] for name, value in samples(0, 0).items()}
        loss = model(**batch).loss
        assert float(loss) == pytest.approx(float(make_model("mixtral")(**batch).loss), abs=1e-5)
        one.backward(loss)
        optimizer.step()


@pytest.mark.ranks(2)
def test_expert_parallel_ranks_agree_on_micro_batches(rank):
    import torch
    from loops import accelerator, make_model, samples

    from accel_state.errors import BackendError

    with accelerator(expert_model_parallel_size=2, num_micro_batches=2) as one:
        model = one.prepare(make_model("mixtral"))
        batch = samples(0, 0, count=4 - one.process_index)
        whose = "a batch of 3 samples" if one.process_index else "an expert-parallel rank has a batch that"
        with pytest.raises(BackendError, match=f"{whose} does not divide into num_micro_batches=2"):
            model(**batch)
        with torch.no_grad():
            found, expected = model.eval()(**batch), make_model("mixtral").eval()(**batch)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
