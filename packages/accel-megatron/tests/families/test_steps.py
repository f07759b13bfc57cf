"""Forward steps of a user's own equal one process. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

LAYOUTS = [
    {"tp_degree": 2, "sequence_parallelism": True},
    {"pp_degree": 2},
    {"use_distributed_optimizer": True},
    {"context_parallel_size": 2},
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.sampled(2)
def test_an_own_step_trains_as_one_process_in_the_ordinary_loop(rank, options):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference, samples, train
    from own import ALPHA, PARTS, Weighted, WeightedStep, losses_of, replica_of

    own = {"custom_train_step_class": WeightedStep, "custom_train_step_kwargs": {"alpha": ALPHA}}
    with accelerator(num_micro_batches=PARTS, **own, **options) as one:
        replica, replicas = replica_of(one, options)
        expected = make_model("llama").double()
        losses = reference(Weighted(expected), replicas, clip=0.5)
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        found = train(one, model, optimizer, replica, clip=0.5)
        if replica == 0:
            assert found == pytest.approx(losses, abs=1e-4)
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5
        batch = samples(0, 9)
        with torch.no_grad():
            loss = model.eval()(**batch).loss
            assert float(loss) == pytest.approx(float(Weighted(expected)(**batch).loss), rel=1e-5)
            assert torch.allclose(model.reported["samples"], losses_of(expected, batch).float(), rtol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.sampled(2)
def test_an_own_step_trains_as_one_process_in_calls_of_train_step(rank, options):
    from loops import STEPS, accelerator, largest_difference, make_model, optimizer_of, reference, samples
    from own import ALPHA, PARTS, Weighted, WeightedStep, replica_of

    own = {"custom_train_step_class": WeightedStep, "custom_train_step_kwargs": {"alpha": ALPHA}}
    with accelerator(num_micro_batches=PARTS, gradient_clipping=0.5, **own, **options) as one:
        replica, replicas = replica_of(one, options)
        expected = make_model("llama").double()
        losses = reference(Weighted(expected), replicas, clip=0.5)
        source = make_model("llama")
        model, _ = one.prepare(source, optimizer_of(source))
        found = [model.train_step(**samples(replica, step)) for step in range(STEPS)]
        assert [skipped for _, skipped, _, _ in found] == [False] * STEPS
        assert all(norm > 0.5 for _, _, norm, _ in found)
        if replicas == 1:
            assert [float(said["lm loss"]) for said, _, _, _ in found] == pytest.approx(losses, abs=1e-4)
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "degree"),
    [
        *((kind, "tp_degree") for kind in ("llama", "bert", "t5")),
        *(
            pytest.param(kind, "context_parallel_size", marks=[pytest.mark.slow] if kind != "bert" else [])
            for kind in ("llama", "bert", "t5")
        ),
    ],
)
@pytest.mark.sampled(2)
def test_the_steps_of_the_families_compute_what_the_families_do(rank, kind, degree):
    from loops import accelerator, largest_difference, make_model, optimizer_of, train

    from accel_megatron import BertTrainStep, GPTTrainStep, T5TrainStep

    step = {"llama": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}[kind]
    results = []
    for own in ({}, {"custom_train_step_class": step}):
        with accelerator(**{degree: 2}, calculate_per_token_loss=False, num_micro_batches=2, **own) as one:
            source = make_model(kind)
            model, optimizer = one.prepare(source, optimizer_of(source))
            results.append((train(one, model, optimizer, 0, batches=kind), one.get_state_dict(model)))
    (losses, expected), (found, weights) = results
    assert found == pytest.approx(losses, abs=1e-5)
    assert largest_difference(weights, expected) < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("degree", ["pp_degree", "context_parallel_size"])
def test_functions_for_batch_and_loss_need_no_class(rank, degree, precision):
    """Sequences lose their last token, so that the stages are told other shapes than those of the batch."""
    import torch
    from loops import accelerator, make_model, samples

    def get_batch(parts):
        part = next(parts)
        ids = part["text"]
        causal = torch.ones(1, 1, ids.shape[1] - 1, ids.shape[1] - 1, dtype=torch.bool).triu(1)
        positions = torch.arange(ids.shape[1] - 1).expand(ids.shape[0], -1)
        return ids[:, :-1], ids[:, 1:], part["weight"], causal.expand(ids.shape[0], -1, -1, -1), positions

    def loss(loss_mask, output):
        return (output.float() * loss_mask[:, None]).sum(), torch.tensor(output.numel()), {"largest": output.max()}

    own = {"custom_get_batch_function": get_batch, "custom_loss_function": loss}
    with accelerator(**{degree: 2}, num_micro_batches=2, mixed_precision=precision, **own) as one:
        source = make_model("gpt2")
        optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
        model, optimizer = one.prepare(source, optimizer)
        ids, weight = samples(0, 0)["input_ids"], torch.tensor([1.0, 2.0, 0.0, 1.0])
        found = model(text=ids, weight=weight)
        expected = make_model("gpt2")
        logits = expected(ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses = losses.view(4, -1)
        mean = (losses * weight[:, None]).mean()
        assert float(found.loss) == pytest.approx(float(mean), rel=5e-3)
        assert float(model.reported["largest"]) == pytest.approx(
            float(torch.stack([part.max() for part in losses.chunk(2)]).mean()), rel=5e-3
        )
        one.backward(found.loss)
        optimizer.step()
        mean.backward()
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
        for name, value in one.get_state_dict(model).items():
            assert torch.allclose(value, expected.state_dict()[name], atol=1e-3), name


@pytest.mark.ranks(1)
def test_calls_and_classes_that_do_not_fit_are_refused_by_name(rank):
    import torch
    from loops import accelerator, make_model, samples
    from own import WeightedStep

    from accel_state.errors import BackendError, ConfigError

    own = {"custom_train_step_class": WeightedStep, "custom_train_step_kwargs": {"alpha": 1.0}}
    with accelerator(**own) as one:
        model = one.prepare(make_model("gpt2"))
        with pytest.raises(BackendError, match=r"takes keywords only; nearest: model\(\*\*batch\)"):
            model(samples(0, 0)["input_ids"])
        with pytest.raises(BackendError, match=r"one number of samples, and it has \{'a': 2, 'b': 3\}"):
            model(a=torch.zeros(2), b=torch.zeros(3))
        with pytest.raises(BackendError, match="was prepared without optimizer"):
            model.train_step(**samples(0, 0))
    refused = pytest.raises(ConfigError, match=r"no function forward_step\(data_iterator, model\)")
    with accelerator(custom_train_step_class=lambda args: object()) as one, refused:
        one.prepare(make_model("gpt2"))
