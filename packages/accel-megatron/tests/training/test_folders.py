"""Megatron-LM's own folders (torch_dist). On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


SPLIT = {"tp_degree": 2, "sequence_parallelism": True, "expert_tensor_parallel_size": 2}


def prepared(one, kind="llama", *, fresh=False):
    import torch
    from loops import make_model, optimizer_of

    source = make_model(kind)
    if fresh:
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.zero_()
    return one.prepare(source, optimizer_of(source))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ({"tp_degree": 2}, {"pp_degree": 2}, "llama"),
        ({"pp_degree": 2}, {"tp_degree": 2}, "bert"),
        pytest.param({"tp_degree": 2}, {"pp_degree": 2}, "megatron bert", marks=pytest.mark.slow),
        pytest.param({"tp_degree": 2}, {}, "t5", marks=pytest.mark.slow),
        pytest.param({"pp_degree": 2}, {"tp_degree": 2}, "gpt2", marks=pytest.mark.slow),
        pytest.param({"expert_model_parallel_size": 2}, {"pp_degree": 2}, "mixtral", marks=pytest.mark.slow),
        pytest.param({"context_parallel_size": 2}, {"tp_degree": 2}, "gpt2", marks=pytest.mark.slow),
        pytest.param({"pp_degree": 2}, SPLIT, "mixtral", marks=pytest.mark.slow),
        pytest.param(SPLIT, {"context_parallel_size": 2}, "mixtral", marks=pytest.mark.slow),
    ],
)
def test_weights_come_back_to_the_bit_with_other_degrees(rank, tmp_path, before, after, kind):
    import torch
    from loops import accelerator, largest_difference, make_model

    from accel_megatron import load_folder, save_folder

    folder = tmp_path / "saved"
    with accelerator(**before) as one:
        save_folder(prepared(one, kind)[0], folder)
    with accelerator(**after) as one:
        model, _ = prepared(one, kind, fresh=True)
        load_folder(model, folder, trust_pickle=True)
        assert largest_difference(one.get_state_dict(model), make_model(kind).state_dict()) == 0
    with accelerator(mixed_precision="bf16", **after) as one:
        model, _ = prepared(one, kind, fresh=True)
        load_folder(model, folder, trust_pickle=True)  # master weights, in fp32
        assert largest_difference(one.get_state_dict(model), make_model(kind).state_dict()) == 0
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.ranks(2)
def test_a_folder_has_the_names_and_full_tensors_of_megatron(rank, tmp_path):
    import torch
    from loops import accelerator, make_model

    from accel_megatron import save_folder, to_megatron

    with accelerator(tp_degree=2) as one:
        save_folder(prepared(one)[0], tmp_path / "saved")
        from megatron.core.dist_checkpointing import load_plain_tensors

        found = load_plain_tensors(str(tmp_path / "saved"))
        source = make_model("llama")
        whole = to_megatron(source.config, {name: value.detach() for name, value in source.named_parameters()})
        norms = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
        for name, value in whole.items():
            if not name.startswith("decoder.layers."):
                assert torch.equal(found[name], value), name
                continue
            _, _, number, rest = name.split(".", 3)
            for local, own in norms.items():
                rest = rest.replace(local, own)
            assert torch.equal(found[f"decoder.layers.{rest}"][int(number)], value), name


@pytest.mark.ranks(2)
def test_folders_that_cannot_be_used_are_refused_on_every_rank(rank, tmp_path):
    from loops import accelerator, make_model

    from accel_megatron import load_folder, save_folder
    from accel_state.errors import BackendError, CheckpointError, CollectiveError

    with accelerator(tp_degree=2) as one:
        model, _ = prepared(one)
        with pytest.raises(CheckpointError, match="runs code when it is read"):
            load_folder(model, tmp_path)
        with pytest.raises(CheckpointError, match=r"has no metadata\.json"):
            load_folder(model, tmp_path, trust_pickle=True)
        with pytest.raises(BackendError, match="pass what prepare returned"):
            save_folder(make_model("llama"), tmp_path / "other")
        save_folder(model, tmp_path / "iter_0000007")
        with pytest.raises((CheckpointError, CollectiveError), match="has files already"):
            save_folder(model, tmp_path / "iter_0000007")
        if one.is_main_process:
            (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
        one.wait_for_everyone()
        load_folder(model, tmp_path, trust_pickle=True)
        unreadable = tmp_path / f"x{rank}"
        unreadable.mkdir()
        (unreadable / "latest_checkpointed_iteration.txt").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match=r"x\d cannot be read: .*can't decode"):
            load_folder(model, unreadable, trust_pickle=True)
    with accelerator(tp_degree=2) as one:
        model, _ = prepared(one, "gpt2")
        with pytest.raises(CheckpointError, match="does not fit the model"):
            load_folder(model, tmp_path, trust_pickle=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"pp_degree": 2}, {"tp_degree": 2, "mixed_precision": "bf16"}])
def test_a_folder_with_another_vocabulary_is_refused_on_every_rank(rank, tmp_path, options):
    from loops import accelerator, make_model

    from accel_megatron import load_folder, save_folder
    from accel_state.errors import CheckpointError

    with accelerator(**options) as one:
        save_folder(prepared(one)[0], tmp_path / "saved")
    with accelerator(**options) as one:
        model = one.prepare(make_model("llama", vocabulary=72))
        with pytest.raises(CheckpointError, match=r"does not fit the model: .*64.*72.*word_embeddings"):
            load_folder(model, tmp_path / "saved", trust_pickle=True)


@pytest.mark.ranks(2)
def test_a_folder_that_one_rank_cannot_write_is_an_error_on_every_rank(rank, tmp_path):
    from resource import RLIMIT_FSIZE, getrlimit, setrlimit

    from loops import accelerator

    from accel_megatron import save_folder
    from accel_state.errors import CheckpointError, CollectiveError

    with accelerator(tp_degree=2) as one:
        model, _ = prepared(one)
        before = getrlimit(RLIMIT_FSIZE)
        if rank == 1:
            setrlimit(RLIMIT_FSIZE, (2**15, before[1]))
        try:
            with pytest.raises((CheckpointError, CollectiveError), match=r"saved cannot be written: .*too large"):
                save_folder(model, tmp_path / "saved")
        finally:
            setrlimit(RLIMIT_FSIZE, before)


@pytest.mark.ranks(2)
def test_all_ranks_load_the_iteration_that_rank_0_finds(rank, tmp_path):
    from loops import accelerator, largest_difference, make_model

    from accel_megatron import load_folder, save_folder

    with accelerator(tp_degree=2) as one:
        model, _ = prepared(one)
        save_folder(model, tmp_path / "iter_0000002")
        own = tmp_path / f"seen by {rank}"  # as if a file system were behind on rank 1
        own.mkdir()
        for iteration in (1, 2):
            (own / f"iter_000000{iteration}").symlink_to(tmp_path / "iter_0000002")
        (own / "latest_checkpointed_iteration.txt").write_text(str(2 - rank))
        if rank == 1:
            (own / "iter_0000001").unlink()
            (own / "iter_0000001").mkdir()
            (own / "iter_0000001" / "metadata.json").write_text("{}")
        model, _ = prepared(one, fresh=True)
        load_folder(model, own, trust_pickle=True)
        assert largest_difference(one.get_state_dict(model), make_model("llama").state_dict()) == 0
