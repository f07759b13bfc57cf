"""Mixed precision with Megatron-LM: 16-bit weights, fp32 master weights. On CPU ranks, under the stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

# Losses and weights against fp32 weights under autocast. A bf16 significand has 8 bits: weights that are rounded to it,
# some of which are about 1, would differ by 2e-3.
TOLERANCE = {"bf16": 1e-3, "fp16": 2e-4}


def assert_trains_as_autocast(rank, precision, kind="llama", *, clip=None, accumulation=1, optimizer="sgd", **options):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, reference, train

    with accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision, **options) as one:
        degrees = options.get("tp_degree", 1) * options.get("pp_degree", 1)
        replicas = one.num_processes // degrees
        replica = one.process_index // options.get("tp_degree", 1) % replicas
        expected = make_model(kind)
        losses = reference(
            expected, replicas, kind=optimizer, accumulation=accumulation, clip=clip, precision=precision, batches=kind
        )
        source = make_model(kind)
        model, prepared = one.prepare(source, optimizer_of(source, optimizer))
        assert {p.dtype for p in model.parameters()} == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
        before = one.get_state_dict(model)
        assert largest_difference(before, make_model(kind).state_dict()) == 0  # master weights, not rounded ones
        found = train(one, model, prepared, replica, accumulation=accumulation, clip=clip, batches=kind)
        if replica == 0:
            assert found == pytest.approx(losses, abs=TOLERANCE[precision])
        after, made = one.get_state_dict(model), expected.state_dict()
        assert {value.dtype for value in after.values()} == {torch.float32}
        assert largest_difference(after, made) < TOLERANCE[precision]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "kind",
    ["gpt2", "llama tied", "bert", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("megatron bert",))],
)
def test_one_rank_trains_as_autocast_in_one_process(rank, kind, precision):
    assert_trains_as_autocast(rank, precision, kind, num_micro_batches=2, clip=0.5, accumulation=2)


LAYOUTS = [
    ("bf16", {"tp_degree": 2, "sequence_parallelism": True}),
    ("bf16", {"use_distributed_optimizer": True, "optimizer": "smooth"}),
    ("fp16", {"pp_degree": 2, "num_micro_batches": 2}),
]
MORE = [
    ("fp16", {"tp_degree": 2, "sequence_parallelism": True}),
    ("fp16", {"use_distributed_optimizer": True, "optimizer": "smooth"}),
    ("bf16", {"pp_degree": 2, "num_micro_batches": 2}),
    ("bf16", {}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("precision", "options"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
def test_two_ranks_train_as_autocast_in_one_process(rank, precision, options):
    assert_trains_as_autocast(rank, precision, clip=0.5, accumulation=2, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_experts_on_two_ranks_train_as_autocast_in_one_process(rank, precision):
    assert_trains_as_autocast(rank, precision, "mixtral", clip=0.5, expert_model_parallel_size=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"pp_degree": 2, "tp_degree": 1}, {"use_distributed_optimizer": True}])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(rank, options):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    from accel.utils import GradScalerKwargs

    handlers = [GradScalerKwargs(init_scale=1024.0)]
    with accelerator(mixed_precision="fp16", kwargs_handlers=handlers, **options) as one:
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        before = one.get_state_dict(model)

        def train(poisoned):
            one.backward(model(**samples(0, 0)).loss)
            if poisoned and one.is_main_process:
                model.gradients.buffers[0][0] = torch.inf
            norm = one.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        assert not train(poisoned=True).isfinite()
        assert optimizer.step_was_skipped
        assert largest_difference(one.get_state_dict(model), before) == 0
        plain = make_model("llama")
        plain(**samples(0, 0)).loss.backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        assert float(train(poisoned=False)) == pytest.approx(float(expected), rel=1e-3)  # without the loss scale
        assert not optimizer.step_was_skipped
        assert one.scaler.get_scale() == 512
        assert largest_difference(one.get_state_dict(model), before) > 1e-3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_checkpoint_of_master_weights_continues_with_other_degrees(rank, precision, tmp_path):
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    def run(options, steps, *, load=False, save=False):
        with accelerator(mixed_precision=precision, **options) as one:
            source = make_model("llama")
            model, optimizer = one.prepare(source, optimizer_of(source, "smooth"))
            if load:
                one.load_state(str(tmp_path / "saved"))
                loaded = one.get_state_dict(model)
            for step in steps:
                one.backward(model(**samples(0, step)).loss)
                optimizer.step()
                optimizer.zero_grad()
            if save:
                one.save_state(str(tmp_path / "saved"))
            return loaded if load and not steps else one.get_state_dict(model)

    saved = run({"tp_degree": 2}, range(2), save=True)
    sharded = {"use_distributed_optimizer": True}
    assert largest_difference(run(sharded, (), load=True), saved) == 0  # fp32, to the bit
    expected = run({"tp_degree": 2}, range(4))
    assert largest_difference(run(sharded, range(2, 4), load=True), expected) < TOLERANCE[precision]


@pytest.mark.ranks(1)
def test_frozen_weights_and_those_of_a_model_without_optimizer_keep_their_fp32_values(rank):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    with accelerator(mixed_precision="bf16") as one, torch.no_grad():
        model = one.prepare(make_model("gpt2"))
        assert model.eval()(**samples(0, 0)).logits.dtype == torch.float32
        assert largest_difference(one.get_state_dict(model), make_model("gpt2").state_dict()) == 0
    with accelerator(mixed_precision="bf16") as one:
        source = make_model("gpt2")
        source.transformer.wte.requires_grad_(False)
        optimizer = optimizer_of(source)
        optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p.requires_grad]
        model, optimizer = one.prepare(source, optimizer)
        one.backward(model(**samples(0, 0)).loss)
        optimizer.step()
        after, before = one.get_state_dict(model), make_model("gpt2").state_dict()
        assert torch.equal(after["transformer.wte.weight"], before["transformer.wte.weight"])
        assert not torch.equal(after["transformer.wpe.weight"], before["transformer.wpe.weight"])


@pytest.mark.ranks(1)
def test_a_model_in_16_bits_needs_mixed_precision_which_widens_it(rank):
    import torch
    from loops import accelerator, make_model

    from accel_state.errors import PrepareError

    with accelerator() as one, pytest.raises(PrepareError, match=r"model.float\(\), or mixed_precision='bf16'"):
        one.prepare(make_model("llama").bfloat16())
    with accelerator(mixed_precision="bf16") as one:
        model = one.prepare(make_model("llama").bfloat16())
        assert {value.dtype for value in one.get_state_dict(model).values()} == {torch.float32}
        with pytest.raises(PrepareError, match="float64"):
            one.prepare(make_model("llama").double())
