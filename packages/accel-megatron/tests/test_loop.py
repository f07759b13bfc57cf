"""What a loop has besides its steps is as with any other backend. On CPU ranks, under the stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def assert_loop_is_that_of_one_process(rank, folder, **options):
    """Schedules, steps of an accumulation, exact metrics of a last batch that is too small, and logged values."""
    import csv

    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples
    from torch.utils.data import DataLoader

    def scheduled(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    data = [{name: value[0] for name, value in samples(0, step, count=2).items()} for step in range(16)]
    held_out = data[:7]
    with accelerator(gradient_accumulation_steps=2, log_with="csv", project_dir=str(folder), **options) as one:
        replicas = one.num_processes // (options.get("tp_degree", 1) * options.get("pp_degree", 1))
        expected = make_model("llama").double()
        updates = optimizer_of(expected)
        schedule = scheduled(updates)
        losses, per_step = [], 2 * 2 * replicas  # windows of two batches of two samples, of each replica
        for begin in range(0, len(data), per_step):
            parts = [data[place : place + 2] for place in range(begin, begin + per_step, 2)]
            for part in parts:
                batch = torch.utils.data.default_collate(part)
                loss = expected(**batch).loss / len(parts)
                loss.backward()
                losses.append(loss.item() * len(parts))
            updates.step()
            schedule.step()
            updates.zero_grad()
        source = make_model("llama")
        optimizer = optimizer_of(source)
        model, optimizer, schedule, loader, held = one.prepare(
            source, optimizer, scheduled(optimizer), DataLoader(data, 2), DataLoader(held_out, 2)
        )
        one.init_trackers("run")
        gathered = []
        for step, batch in enumerate(loader):
            with one.accumulate(model):
                loss = model(**batch).loss
                gathered.append(one.gather_for_metrics(loss.detach().repeat(2)))
                one.log({"loss": float(gathered[-1].mean())}, step=step)
                one.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        assert torch.cat(gathered)[::2].tolist() == pytest.approx(losses, abs=1e-5)
        steps = len(data) // per_step
        assert schedule.get_last_lr()[0] == pytest.approx(1e-2 / (1 + steps))
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5
        model.eval()
        with torch.no_grad():
            found = torch.cat([one.gather_for_metrics(model(**batch).logits[:, 0]) for batch in held])
            batch = torch.utils.data.default_collate(held_out)
            assert torch.allclose(found, expected(**batch).logits[:, 0].float(), atol=1e-4)  # seven rows, in order
    if rank == 0:
        (table,) = folder.rglob("metrics.csv")
        logged = [float(row["loss"]) for row in csv.DictReader(table.open())]
        assert logged == pytest.approx(torch.tensor(losses).view(-1, replicas).mean(1).tolist(), abs=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}])
@pytest.mark.sampled(1)
def test_schedules_metrics_and_logs_are_those_of_one_process(rank, tmp_path, options):
    assert_loop_is_that_of_one_process(rank, tmp_path, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"tp_degree": 2}, {"pp_degree": 2}])
def test_a_seed_repeats_the_dropout(rank, options):
    from loops import accelerator, make_model, samples

    from accel.utils import set_seed

    def losses(seed):
        with accelerator(hidden_dropout=0.2, attention_dropout=0.2, **options) as one:
            source = make_model("gpt2")
            set_seed(seed)
            model = one.prepare(source)
            return [float(model(**samples(0, 0)).loss) for _ in range(2)]

    first = losses(3)
    assert first[0] != first[1]
    assert losses(3) == first
    assert losses(4) != first


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options", [{"tp_degree": 2}, {"tp_degree": 2, "sequence_parallelism": True}, {"use_distributed_optimizer": True}]
)
@pytest.mark.sampled(1)
def test_dropout_continues_after_a_checkpoint_as_without_it(rank, options, tmp_path):
    from loops import largest_difference, trained

    options = {"hidden_dropout": 0.2, "attention_dropout": 0.2, **options}

    trained(options, range(2), kind="gpt2", save=tmp_path / "saved")
    continued = trained(options, range(2, 4), kind="gpt2", load=tmp_path / "saved")
    assert largest_difference(continued, trained(options, range(4), kind="gpt2")) < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recomputed", "forwards"),
    [
        ({"recompute_granularity": "full"}, 2),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}, 2),
        ({"recompute_granularity": "selective"}, 1),
    ],
)
@pytest.mark.sampled(1)
def test_recomputed_activations_train_as_one_process(rank, recomputed, forwards):
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference, train

    from accel_megatron.training.stage import bare

    with accelerator(tp_degree=2, recompute_activations=True, **recomputed) as one:
        expected = make_model("llama").double()
        losses = reference(expected, 1)
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        layer, calls = bare(model.chunks[0]).decoder.layers[0], []
        layer.mlp.register_forward_hook(lambda *given: calls.append(given[0]))
        assert train(one, model, optimizer, 0) == pytest.approx(losses, abs=1e-5)
        assert len(calls) == 3 * forwards
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5
