"""Steps in the style of Accelerate's engine equal the ordinary loop. On CPU ranks, under the stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "precision"),
    [({"tp_degree": 2}, "no"), ({"pp_degree": 2, "num_micro_batches": 2}, "fp16")],
)
def test_calls_of_train_step_train_as_the_loop(rank, options, precision):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    def prepared(one):
        source = make_model("llama")
        optimizer = optimizer_of(source)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return one.prepare(source, optimizer, schedule)

    options = {"gradient_clipping": 0.5, "mixed_precision": precision, **options}
    with accelerator(**options) as one:
        model, optimizer, schedule = prepared(one)
        losses, norms = [], []
        for step in range(3):
            loss = model(**samples(0, step)).loss
            one.backward(loss)
            norms.append(float(one.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        expected = one.get_state_dict(model)
    with accelerator(**options) as one:
        model, optimizer, schedule = prepared(one)
        found = []
        for step in range(3):
            found.append(model.train_step(**samples(0, step)))
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
        assert [float(said["lm loss"]) for said, _, _, _ in found] == losses
        assert [float(norm) for _, _, norm, _ in found] == norms
        assert largest_difference(one.get_state_dict(model), expected) == 0
        said = model.eval().eval_step(**samples(0, 3))
        assert said["lm loss"].requires_grad is False
        with torch.no_grad():
            assert float(said["lm loss"]) == float(model(**samples(0, 3)).loss)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True}, {"mixed_precision": "fp16"}])
def test_gradients_may_be_dropped_before_any_line_of_a_step(rank, options):
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    trained = []
    for place in ("behind the step", "before the call", "before the backward"):
        with accelerator(**options) as one:
            source = make_model("llama")
            model, optimizer = one.prepare(source, optimizer_of(source))
            for step in range(3):
                if place == "before the call":
                    optimizer.zero_grad()
                loss = model(**samples(0, step)).loss
                if place == "before the backward":
                    optimizer.zero_grad()
                one.backward(loss)
                optimizer.step()
                if place == "behind the step":
                    optimizer.zero_grad()
            trained.append(one.get_state_dict(model))
    first, *others = trained
    assert [largest_difference(one, first) for one in others] == [0, 0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "t5"])
def test_training_continues_after_an_evaluation_in_inference_mode(rank, kind):
    import torch
    from loops import accelerator, make_model, optimizer_of, samples

    with accelerator() as one:
        source = make_model(kind)
        model, optimizer = one.prepare(source, optimizer_of(source))
        for step in range(2):
            model.eval()
            with torch.inference_mode():
                evaluated = float(model(**samples(0, step, kind=kind)).loss)
            model.train()
            loss = model(**samples(0, step, kind=kind)).loss
            assert evaluated == pytest.approx(float(loss.detach()), abs=1e-5)
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(1)
def test_an_argument_that_the_family_does_not_take_is_named(rank):
    from loops import accelerator, make_model, samples

    from accel_state.errors import BackendError

    with accelerator() as one:
        model = one.prepare(make_model("llama"))
        with pytest.raises(BackendError, match=r"takes input_ids, .*, and not use_cache; nearest: leave use_cache out"):
            model(**samples(0, 0), use_cache=False)
