"""Context parallelism with Megatron-LM equals one process. On CPU ranks, under the tests' stand-in for CUDA.

"uneven" batches have sequences that the ranks do not divide, and most of their labels on one of two ranks.
"""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

TWO = {"context_parallel_size": 2}
SEQUENCES = {"tp_degree": 2, "sequence_parallelism": True}


def assert_trains(kind, *, exact=False, **options):
    """In fp64 if ``exact``."""
    import torch
    from loops import assert_trains_as_one_process

    precision = {"dtype": torch.float64, "tolerance": 1e-10} if exact else {}
    given = {"optimizer": "sgd", "accumulation": 2, "clip": 0.5, "batches": "uneven"} | options
    assert_trains_as_one_process(kind, **TWO, **precision, **given)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("gpt2", True),
        ("llama", True),
        *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("bert", "megatron bert", "megatron bert words")),
        *(pytest.param(one, False, marks=pytest.mark.slow) for one in ("gpt2", "llama", "t5", "t5 gated")),
    ],
)
def test_two_ranks_train_as_one_process(rank, kind, exact):
    assert_trains(kind, exact=exact, num_micro_batches=2)


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"calculate_per_token_loss": False},
        {"recompute_activations": True},
        {"recompute_activations": True, "recompute_granularity": "selective"},
        {"batches": ""},
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_options_of_a_step_keep_their_meaning(rank, kind, options):
    assert_trains(kind, exact=True, **options)


STAGES = {"pp_degree": 2, "num_micro_batches": 2}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"exact": True, **SEQUENCES}),
        ("gpt2", {"exact": True, **STAGES}),
        ("llama", {"use_distributed_optimizer": True, "optimizer": "adamw"}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("gpt2", {"exact": True, **SEQUENCES}),
                ("gpt2", {"exact": True, "tp_degree": 2}),
                ("llama", {"exact": True, **STAGES}),
                ("llama tied", {"exact": True, **STAGES}),
                ("gpt2", {"exact": True}),
                ("llama", {"exact": True}),
                ("llama", SEQUENCES),
                ("gpt2", STAGES),
                ("gpt2", {"use_distributed_optimizer": True, "optimizer": "adamw"}),
                ("bert", {"exact": True, **SEQUENCES}),
                ("megatron bert", {"exact": True, **STAGES}),
                ("t5", SEQUENCES),
                ("t5 gated", {}),
            )
        ),
    ],
)
@pytest.mark.sampled(1)
def test_two_ranks_of_each_of_two_train_as_one_process(rank, kind, options):
    """With two tensor-parallel ranks, stages or replicas."""
    assert_trains(kind, **options)


@pytest.mark.ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "exact"), [("gpt2", True), ("t5", False)])
def test_four_ranks_train_as_one_process(rank, kind, exact):
    import torch
    from loops import assert_trains_as_one_process

    precision = {"dtype": torch.float64, "tolerance": 1e-10} if exact else {}
    assert_trains_as_one_process(kind, context_parallel_size=4, batches="uneven", optimizer="sgd", **precision)


@pytest.mark.ranks(8)
@pytest.mark.slow
def test_two_ranks_of_each_of_four_interleaved_stages_train_as_one_process(rank):
    interleaved = {"pp_degree": 4, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1, "layers": 8}
    assert_trains("llama", exact=True, **interleaved)


@pytest.mark.ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"expert_model_parallel_size": 2}, {**SEQUENCES, "expert_tensor_parallel_size": 2}]
)
def test_mixtures_of_experts_train_as_one_process(rank, options):
    """Expert-parallel ranks are context-parallel ranks here, or replicas."""
    from test_experts import assert_trains_as_one_process

    assert_trains_as_one_process(rank, **TWO, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "mixtral", "bert", "t5"))]
)
@pytest.mark.parametrize("length", [9, 12])
def test_evaluation_returns_full_logits(rank, kind, length):
    import torch
    from loops import accelerator, make_model, samples

    with accelerator(**TWO) as one, torch.no_grad():
        given = samples(0, 0, kind=kind)
        batch = {name: one[:, :length].contiguous() if one.ndim > 1 else one for name, one in given.items()}
        expected = make_model(kind).eval()(**batch)
        found = one.prepare(make_model(kind)).eval()(**batch)
        assert float(found.loss) == pytest.approx(float(expected.loss), abs=1e-5)
        kept = batch["attention_mask"] == 1
        for name in ("logits", "prediction_logits", "seq_relationship_logits"):
            if name in expected:
                rows = kept if name != "seq_relationship_logits" and kind != "t5" else ...
                assert torch.allclose(found[name][rows], expected[name][rows], atol=1e-5), name


@pytest.mark.ranks(2)
def test_tokens_see_what_masks_of_megatrons_data_sets_show(rank):
    """Packed sequences: positions begin anew, and tokens of one do not see the other."""
    import torch
    from loops import accelerator, make_model, samples

    ids = samples(0, 0)["input_ids"]
    place = torch.arange(12)
    first = place < 5
    hidden = (place[:, None] < place) | (first[:, None] != first)
    positions = torch.where(first, place, place - 5)
    batch = {
        "tokens": ids,
        "labels": ids.roll(-1, 1),
        "loss_mask": (place != 4).float().expand(4, -1),
        "attention_mask": hidden.expand(4, 1, -1, -1),
        "position_ids": positions.expand(4, -1),
    }
    with torch.no_grad():
        expected = torch.cat([make_model("gpt2").eval()(part).logits for part in (ids[:, :5], ids[:, 5:])], 1)
    with accelerator(**TWO) as one, torch.no_grad():
        assert torch.allclose(one.prepare(make_model("gpt2")).eval()(**batch).logits, expected, atol=1e-5)


@pytest.mark.ranks(2)
def test_no_rank_has_the_mask_of_full_sequences(rank):
    import torch
    from loops import accelerator, make_model, samples

    shapes = []
    with accelerator(**TWO) as one, torch.no_grad():
        model = one.prepare(make_model("gpt2")).eval()
        attention = model.chunks[0].module.decoder.layers[0].self_attention.core_attention
        attention.register_forward_pre_hook(lambda module, given: shapes.append([one.shape for one in given]))
        model(**samples(0, 0))
    assert shapes == [[(6, 4, 4, 8)] * 3 + [(4, 1, 1, 12)]]


@pytest.mark.ranks(2)
def test_without_a_mask_tokens_see_those_before_them(rank):
    import torch
    from loops import accelerator, make_model, samples

    def get_batch(parts):
        ids = next(parts)["text"]
        return ids[:, :-1], ids[:, 1:], torch.ones(ids[:, 1:].shape), None, torch.arange(11).expand(4, -1)

    ids = samples(0, 0)["input_ids"]
    expected = make_model("gpt2")(input_ids=ids, labels=ids).loss
    with accelerator(**TWO, custom_get_batch_function=get_batch) as one:
        assert float(one.prepare(make_model("gpt2"))(text=ids).loss) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_continues_with_other_degrees(rank, sharded, tmp_path):
    """From context-parallel ranks to whole sequences, then to tensor-parallel ranks."""
    from loops import largest_difference, trained

    context = {**TWO, "use_distributed_optimizer": sharded}
    expected = trained(context, range(6))
    trained(context, range(2), save=tmp_path / "first")
    trained({}, range(2, 4), load=tmp_path / "first", save=tmp_path / "second")
    continued = trained({"tp_degree": 2}, range(4, 6), load=tmp_path / "second", save=tmp_path / "third")
    assert largest_difference(continued, expected) < 1e-4
    again = trained(context, (), load=tmp_path / "third")
    assert largest_difference(again, continued) == 0


@pytest.mark.ranks(2)
def test_dropout_differs_between_ranks_and_continues_after_a_checkpoint(rank, tmp_path):
    import torch
    from loops import accelerator, largest_difference, make_model, samples, trained

    dropout = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    with accelerator(**TWO, **dropout) as one:
        torch.manual_seed(0)
        model = one.prepare(make_model("gpt2"))
        dropped = []
        first = model.chunks[0].module.embedding.embedding_dropout
        first.register_forward_hook(lambda module, given, output: dropped.append(output == 0))
        model(**samples(0, 0))
        other = [torch.empty_like(dropped[0]) for _ in range(2)]
        torch.distributed.all_gather(other, dropped[0])
        assert 0.4 < (other[0] == other[1]).float().mean() < 0.6
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
        torch.distributed.all_gather(states, torch.get_rng_state())
        assert torch.equal(*states)
    options = {**TWO, **dropout}
    torch.manual_seed(1)
    expected = trained(options, range(4), kind="gpt2")
    torch.manual_seed(1)
    trained(options, range(2), kind="gpt2", save=tmp_path / "saved")
    continued = trained(options, range(2, 4), kind="gpt2", load=tmp_path / "saved")
    assert largest_difference(continued, expected) < 1e-6


@pytest.mark.ranks(2)
def test_a_checkpoint_of_replicas_gives_both_ranks_one_random_state(rank, tmp_path):
    import torch
    from loops import accelerator, make_model

    with accelerator() as one:
        one.prepare(make_model("llama"))
        torch.manual_seed(rank)
        one.save_state(str(tmp_path / "saved"))
    with accelerator(**TWO) as one:
        one.prepare(make_model("llama"))
        one.load_state(str(tmp_path / "saved"))
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
        torch.distributed.all_gather(states, torch.get_rng_state())
        assert torch.equal(*states)


@pytest.mark.ranks(2)
def test_both_ranks_read_all_samples_and_metrics_count_each_once(rank):
    import torch
    from loops import accelerator, make_model, samples
    from torch.utils.data import DataLoader

    from accel import ParallelismConfig

    rows = samples(0, 0, count=7)
    listed = [{name: value[number] for name, value in rows.items()} for number in range(7)]
    with accelerator(parallelism_config=ParallelismConfig(cp_size=2)) as one, torch.no_grad():
        assert one.backend.config.context_parallel_size == 2
        model, loader = one.prepare(make_model("llama"), DataLoader(listed, batch_size=2))
        model.eval()
        found = torch.cat([one.gather_for_metrics(model(**batch).logits.argmax(-1)) for batch in loader])
        expected = make_model("llama").eval()(**rows).logits.argmax(-1)
        kept = rows["attention_mask"] == 1
        assert torch.equal(found[kept], expected[kept])
        assert found.shape == expected.shape


@pytest.mark.ranks(2)
def test_a_forward_step_gives_what_can_be_divided(rank):
    import torch
    from loops import accelerator, make_model, samples

    from accel_megatron import GPTTrainStep
    from accel_state.errors import BackendError

    class FromEmbeddings(GPTTrainStep):
        def get_forward_step_func(self):
            def forward_step(parts, model):
                tokens, labels, _, mask, positions = self.get_batch(parts)
                hidden = torch.zeros(tokens.shape[1], tokens.shape[0], 32)
                return model(tokens, positions, mask, decoder_input=hidden, labels=labels), None

            return forward_step

    with accelerator(**TWO, custom_train_step_class=FromEmbeddings) as one:
        model = one.prepare(make_model("llama"))
        with pytest.raises(BackendError, match=r"decoder_input of a forward step.*nearest: context_parallel_size=1"):
            model(**samples(0, 0))
