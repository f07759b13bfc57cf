"""Models in 16 bits with fp32 master weights, and in fp64. On CPU ranks, under the tests' stand-in for CUDA."""

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
        shared = options.get("tp_degree", 1) * options.get("context_parallel_size", 1)
        replicas = one.num_processes // (shared * options.get("pp_degree", 1))
        replica = one.process_index // shared % replicas
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
@pytest.mark.sampled(2)
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
    ("bf16", {"context_parallel_size": 2}),
    ("fp16", {"context_parallel_size": 2}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("precision", "options"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)]
)
@pytest.mark.sampled(1)
def test_two_ranks_train_as_autocast_in_one_process(rank, precision, options):
    assert_trains_as_autocast(rank, precision, clip=0.5, accumulation=2, **options)


IN_FP64 = [
    {"tp_degree": 2},
    {"tp_degree": 2, "sequence_parallelism": True},
    {"pp_degree": 2, "num_micro_batches": 2},
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", IN_FP64)
@pytest.mark.parametrize("kind", ["gpt2", "llama", pytest.param("bert", marks=pytest.mark.slow)])
@pytest.mark.sampled(2)
def test_a_model_in_fp64_trains_on_two_ranks_as_in_one_process(rank, kind, options):
    import torch
    from loops import assert_trains_as_one_process

    assert_trains_as_one_process(
        kind, dtype=torch.float64, tolerance=1e-10, accumulation=2, clip=0.5, optimizer="sgd", **options
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_in_fp64_trains_on_two_stages_of_two_tensor_parallel_ranks_as_in_one_process(rank, kind):
    import torch
    from loops import assert_trains_as_one_process

    options = {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4, "sequence_parallelism": True}
    assert_trains_as_one_process(kind, dtype=torch.float64, tolerance=1e-10, clip=0.5, **options)


@pytest.mark.ranks(2)
def test_weights_logits_states_and_windows_in_fp64_are_kept_to_the_bit(rank, tmp_path):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of, samples

    from accel_megatron import load_folder, save_folder

    def prepared(one, factor=1.0):
        source = make_model("llama").double()
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(factor / 3)
        return one.prepare(source, optimizer_of(source))

    with accelerator(tp_degree=2, gradient_accumulation_steps=2) as one:
        model, optimizer = prepared(one)
        for step in range(3):  # the second window stays open
            with one.accumulate(model):
                one.backward(model(**samples(0, step)).loss)
                optimizer.step()
                optimizer.zero_grad()
        one.save_state(str(tmp_path / "state"))
        save_folder(model, tmp_path / "folder")
        saved = one.get_state_dict(model)
        window = one.backend.gradients.unreduced(model)
        assert {value.dtype for value in (*saved.values(), *window.values())} == {torch.float64}
        assert largest_difference({name: value.float().double() for name, value in saved.items()}, saved) > 0
        with torch.no_grad():
            assert model.eval()(**samples(0, 0)).logits.dtype == torch.float64
    with accelerator(pp_degree=2, gradient_accumulation_steps=2) as one:
        model, optimizer = prepared(one, factor=2.0)
        load_folder(model, tmp_path / "folder", trust_pickle=True)
        assert largest_difference(one.get_state_dict(model), saved) == 0
        moments = [one["exp_avg"].dtype for one in optimizer.state.values()]
        assert set(moments) == {torch.float64}
    with accelerator(pp_degree=2, gradient_accumulation_steps=2) as one:
        model, _ = prepared(one, factor=2.0)
        one.load_state(str(tmp_path / "state"))
        assert largest_difference(one.get_state_dict(model), saved) == 0
        assert largest_difference(one.backend.gradients.unreduced(model), window) == 0
        with torch.no_grad():  # the first stage gets logits in the dtype of the last one
            assert model.eval()(**samples(0, 0)).logits.dtype == torch.float64


@pytest.mark.ranks(1)
def test_what_is_not_computed_in_fp64_is_refused(rank):
    from loops import accelerator, make_model, optimizer_of

    from accel_state.errors import PrepareError

    with accelerator() as one:
        for kind, reason in (("mixtral", "choose experts in fp32"), ("t5", "norms and attention of a T5 in fp32")):
            with pytest.raises(PrepareError, match=f"{reason}.*; nearest: model.float"):
                one.prepare(make_model(kind).double())
        mixed = make_model("llama").double()
        mixed.lm_head.float()
        with pytest.raises(PrepareError, match=r"torch\.float64; .*or all in fp64"):
            one.prepare(mixed)
    with accelerator(use_distributed_optimizer=True) as one:
        source = make_model("llama").double()
        with pytest.raises(PrepareError, match="nearest: use_distributed_optimizer=False"):
            one.prepare(source, optimizer_of(source))


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
