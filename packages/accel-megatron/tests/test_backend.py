"""The ordinary loop with Megatron-LM equals one process. On CPU ranks, under the tests' stand-in for CUDA."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama tied"])
@pytest.mark.sampled(3)
def test_one_rank_trains_as_one_process(rank, kind, optimizer):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, num_micro_batches=2, optimizer=optimizer, clip=0.5, accumulation=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.sampled(2)
def test_two_tensor_parallel_ranks_train_as_one_process(rank, kind, sequence):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, tp_degree=2, sequence_parallelism=sequence, clip=0.5, optimizer="sgd")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama tied"])
def test_two_stages_train_as_one_process(rank, kind):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, pp_degree=2, num_micro_batches=2, clip=0.5, optimizer="sgd")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "sequence"), [("gpt2", True), ("llama", True), ("llama tied", False)])
@pytest.mark.sampled(1)
def test_two_stages_of_two_tensor_parallel_ranks_train_as_one_process(rank, kind, sequence):
    from loops import assert_trains_as_one_process

    options = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4, "sequence_parallelism": sequence}
    assert_trains_as_one_process(kind, accumulation=2, clip=0.5, optimizer="sgd", **options)


INTERLEAVED = {"pp_degree": 4, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {"optimizer": "sgd"}),
        ("llama", {"use_distributed_optimizer": True}),
        pytest.param("megatron bert", {"optimizer": "sgd"}, marks=pytest.mark.slow),
    ],
)
def test_four_stages_with_an_interleaved_schedule_train_as_one_process(rank, kind, options):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(kind, accumulation=2, clip=0.5, layers=8, **options, **INTERLEAVED)


@pytest.mark.ranks(4)
def test_an_interleaved_model_evaluates_any_batch_and_continues_with_other_degrees(rank, tmp_path):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples, trained

    from accel_megatron import load_folder, save_folder
    from accel_state.errors import BackendError

    def prepared(one):
        source = make_model("llama", layers=8)
        return one.prepare(source, optimizer_of(source))

    plain = {"tp_degree": 2, "pp_degree": 2}
    with accelerator(**INTERLEAVED) as one:
        model, _ = prepared(one)
        assert [len(chunk.module.decoder.layers) for chunk in model.chunks] == [1, 1]
        batch = samples(0, 0, count=3)
        with pytest.raises(BackendError, match="a batch of 3 samples does not divide into num_micro_batches=4"):
            model(**batch)
        with torch.no_grad():
            expected, found = make_model("llama", layers=8).eval()(**batch), model.eval()(**batch)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
        assert torch.allclose(found.logits, expected.logits, atol=1e-5)
        model.train().train_step(**samples(0, 0))
        save_folder(model, tmp_path / "folder")
        saved = one.get_state_dict(model)
        model.train_step(**samples(0, 1))
        stepped = one.get_state_dict(model)
    with accelerator(**plain) as one:
        model, _ = prepared(one)
        load_folder(model, tmp_path / "folder", trust_pickle=True)
        assert largest_difference(one.get_state_dict(model), saved) == 0
        model.train_step(**samples(0, 1))
        assert largest_difference(one.get_state_dict(model), stepped) < 1e-5
    expected = trained(plain, range(4), layers=8)
    trained(INTERLEAVED, range(2), layers=8, save=tmp_path / "saved")
    assert largest_difference(trained(plain, range(2, 4), layers=8, load=tmp_path / "saved"), expected) < 1e-4
    again = trained(INTERLEAVED, range(2, 4), layers=8, load=tmp_path / "saved")
    assert largest_difference(again, expected) < 1e-4


@pytest.mark.ranks(4)
def test_layers_that_chunks_do_not_divide_are_refused_on_every_rank(rank):
    from loops import accelerator, make_model

    from accel_state.errors import PrepareError

    options = {**INTERLEAVED, "num_layers_per_virtual_pipeline_stage": 3}
    refused = "=3 does not divide the 2 layers of each of 4 stages; nearest: 2"
    with accelerator(**options) as one, pytest.raises(PrepareError, match=refused):
        one.prepare(make_model("llama", layers=8))


@pytest.mark.ranks(1)
def test_a_distributed_optimizer_of_some_parameters_is_refused_by_the_others_names(rank):
    import torch
    from loops import accelerator, make_model

    from accel_state.errors import PrepareError

    model = make_model("llama")
    some = torch.optim.AdamW(p for name, p in model.named_parameters() if "mlp" in name)
    lacking = r"the optimizer lacks model.embed_tokens.weight, .* more; nearest: requires_grad_\(False\)"
    with accelerator(use_distributed_optimizer=True) as one:
        with pytest.raises(PrepareError, match=lacking):
            one.prepare(model, some)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        one.prepare(model, some)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_two_replicas_train_as_one_process(rank, sharded):
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(
        "llama", use_distributed_optimizer=sharded, optimizer="adamw" if sharded else "sgd", accumulation=2
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tp_degree", "pp_degree"])
def test_evaluation_returns_loss_and_logits_on_every_rank(rank, axis):
    import torch
    from loops import accelerator, make_model, samples

    with accelerator(**{axis: 2}) as one, torch.no_grad():
        batch = samples(0, 0)
        expected = make_model("gpt2").eval()(**batch)
        found = one.prepare(make_model("gpt2")).eval()(**batch)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
        kept = batch["attention_mask"] == 1
        assert torch.allclose(found.logits[kept], expected.logits[kept], atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_full_before_and_after_clipping(rank, sharded):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference_gradients, samples

    with accelerator(use_distributed_optimizer=sharded) as one:
        gradients = reference_gradients("gpt2", 2)
        source = make_model("gpt2")
        model, _ = one.prepare(source, optimizer_of(source))
        one.backward(model(**samples(one.process_index, 0)).loss)
        assert largest_difference(one.full_gradients(model), gradients) < 1e-5
        norm = torch.nn.utils.get_total_norm(gradients.values())
        assert norm > 0.2  # so that clipping changes gradients
        assert float(one.clip_grad_norm_(model.parameters(), 0.1)) == pytest.approx(float(norm), rel=1e-5)
        clipped = {name: 0.1 / (norm + 1e-6) * value for name, value in gradients.items()}
        assert largest_difference(one.full_gradients(model), clipped) < 1e-6


LAUNCHED = """
import sys
sys.path.insert(0, {folder!r})
from cuda_on_cpu import cuda_on_cpu
from loops import make_model, optimizer_of, samples

with cuda_on_cpu():
    from accel import Accelerator

    accelerator = Accelerator()
    model = make_model("llama")
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.backward(model(**samples(0, 0)).loss)
    optimizer.step()
    config = accelerator.backend.config
    accelerator.print("trained", accelerator.backend.name, config.pp_degree, config.num_micro_batches)
    accelerator.end_training()
"""


def test_flags_of_accel_launch_reach_the_backend(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED.format(folder=str(Path(__file__).parent)))
    flags = ["--use_megatron_lm", "--megatron_lm_pp_degree", "2", "--megatron_lm_num_micro_batches", "2"]
    command = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2", *flags, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "trained megatron 2 2" in done.stdout, done.stderr
