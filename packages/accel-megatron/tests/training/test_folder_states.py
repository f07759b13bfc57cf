"""States of optimizers in Megatron-LM's own folders. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

SHARDED = {"use_distributed_optimizer": True}


def stepped(one, model, optimizer, steps, kind="llama"):
    from loops import samples

    for step in steps:
        one.backward(model(**samples(0, step, kind=kind)).loss)
        optimizer.step()
        optimizer.zero_grad()
    return one.get_state_dict(model)


def states_of(one, model, optimizer):
    return one.backend.states.optimizer(optimizer.optimizer, [model])


def assert_same_states(found, expected):
    import torch

    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for name, values in expected["state"].items():
        assert found["state"][name].keys() == values.keys(), name
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(found["state"][name][key]), torch.as_tensor(value)), (name, key)


def assert_same_weights(found, expected, *, halves):
    """Within rounding: of fp32; or of bf16, in which megatron-core's model has its weights."""
    import torch

    for name, value in expected.items():
        dtype = torch.bfloat16 if halves else torch.float32
        torch.testing.assert_close(found[name].to(dtype), value.to(dtype), rtol=2**-8 if halves else 0, atol=1e-5)


class MegatronsOwn:
    """A prepared model with megatron-core's own optimizer, saved and loaded by megatron-core itself."""

    def __init__(self, one, *, halves=False, sharded=False):
        import torch
        from loops import make_model
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.model = one.prepare(make_model("llama"))
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            adam_eps=1e-3,
            clip_grad=0.0,
            bf16=halves,
            params_dtype=torch.bfloat16 if halves else torch.float32,
            use_distributed_optimizer=sharded,
        )
        self.model.kept.clear()  # its weights are those that it computes with
        self.optimizer = get_megatron_optimizer(config, list(self.model.chunks), use_gloo_process_groups=False)
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= group["wd_mult"]  # as Megatron-LM's scheduler does
        if sharded:
            self._keep_steps(self.optimizer.chained_optimizers[0])
        self.one = one
        self.metadata = {"distrib_optim_sharding_type": "fully_reshardable"}

    @staticmethod
    def _keep_steps(optimizer):
        """Lets megatron-core load into torch's Adam: it counts on Apex's, whose steps are those of groups."""
        load = optimizer._set_main_param_and_optimizer_states

        def with_step(parameter, tensors):
            group, position = optimizer.model_param_group_index_map[parameter]
            shard = optimizer.optimizer.param_groups[group]["params"][position]
            state = optimizer.optimizer.state[shard]
            state["step"] = state["step"].clone()  # all shards were given one tensor, which each step counts up
            load(parameter, {**tensors, "step": state["step"]})

        optimizer._set_main_param_and_optimizer_states = with_step

    def train(self, steps):
        from loops import samples

        for step in steps:
            self.one.backward(self.model(**samples(0, step)).loss)
            self.model.gradients.reduce()
            self.optimizer.step()
            self.model.gradients.clear()
            self.optimizer.zero_grad()
        return self.one.get_state_dict(self.model)

    def described(self, *, loading=False):
        from accel_megatron.training.stage import bare

        weights = bare(self.model.chunks[0]).sharded_state_dict()
        more = {"is_loading": True} if loading else {}
        return {
            "model": weights,
            "optimizer": self.optimizer.sharded_state_dict(weights, metadata=self.metadata, **more),
        }

    def save(self, folder):
        from megatron.core import dist_checkpointing

        from accel_megatron.private import without_writer_process

        if self.one.is_main_process:
            folder.mkdir()
        self.one.wait_for_everyone()
        with without_writer_process():
            dist_checkpointing.save(self.described(), str(folder))

    def load(self, folder):
        from megatron.core import dist_checkpointing

        from accel_megatron.training.stage import bare

        loaded = dist_checkpointing.load(self.described(loading=True), str(folder))
        bare(self.model.chunks[0]).load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("before", "after", "kind", "optimizer"),
    [
        ({"tp_degree": 2}, {"pp_degree": 2}, "llama tied", "adamw"),
        ({"tp_degree": 2, "mixed_precision": "bf16"}, {"mixed_precision": "bf16", **SHARDED}, "llama", "adamw"),
        (SHARDED, {"tp_degree": 2}, "llama", "adamw"),
        pytest.param({"pp_degree": 2}, {"tp_degree": 2}, "gpt2", "sgd", marks=pytest.mark.slow),
        pytest.param({"pp_degree": 2}, SHARDED, "megatron bert", "adamw", marks=pytest.mark.slow),
        pytest.param({"tp_degree": 2}, SHARDED, "t5", "adamw", marks=pytest.mark.slow),
        pytest.param({"expert_model_parallel_size": 2}, {"pp_degree": 2}, "mixtral", "adamw", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_states_come_back_to_the_bit_with_other_degrees(rank, tmp_path, before, after, kind, optimizer):
    from loops import accelerator, largest_difference, make_model, optimizer_of

    from accel_megatron import load_folder, save_folder

    def prepared(one):
        source = make_model(kind)
        return one.prepare(source, optimizer_of(source, optimizer))

    with accelerator(**before) as one:
        model, updates = prepared(one)
        weights = stepped(one, model, updates, range(2), kind)
        updates.optimizer.param_groups[0]["lr"] = 0.03
        states = states_of(one, model, updates)
        save_folder(model, tmp_path / "saved")
    with accelerator(**after) as one:
        model, updates = prepared(one)
        load_folder(model, tmp_path / "saved", trust_pickle=True)
        assert largest_difference(one.get_state_dict(model), weights) == 0
        assert_same_states(states_of(one, model, updates), states)
        stepped(one, model, updates, [2], kind)


HALVES = {"mixed_precision": "bf16"}
FORMS = [
    ({"tp_degree": 2}, {"pp_degree": 2}),
    ({"tp_degree": 2, **HALVES}, {"tp_degree": 2, **HALVES}),
    (SHARDED, {"tp_degree": 2}),
    ({**SHARDED, **HALVES}, {**SHARDED, **HALVES}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("theirs", "ours"), FORMS)
@pytest.mark.sampled(2)
def test_what_megatron_core_saved_continues_here(rank, tmp_path, theirs, ours):
    from loops import accelerator, make_model, optimizer_of

    from accel_megatron import load_folder

    halves = "mixed_precision" in theirs
    with accelerator(**theirs) as one:
        own = MegatronsOwn(one, halves=halves, sharded="use_distributed_optimizer" in theirs)
        own.train(range(2))
        own.save(tmp_path / "saved")
        expected = own.train([2])
    with accelerator(**ours) as one:
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        load_folder(model, tmp_path / "saved", trust_pickle=True)
        found = stepped(one, model, optimizer, [2])
        assert_same_weights(found, expected, halves=halves)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("ours", "theirs"), FORMS)
@pytest.mark.sampled(2)
def test_what_is_saved_here_continues_in_megatron_core(rank, tmp_path, ours, theirs):
    from loops import accelerator, make_model, optimizer_of

    from accel_megatron import save_folder

    halves, sharded = "mixed_precision" in ours, "use_distributed_optimizer" in ours
    with accelerator(**ours) as one:
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        stepped(one, model, optimizer, range(2))
        save_folder(model, tmp_path / "saved")
        expected = stepped(one, model, optimizer, [2])
    # megatron-core itself loads the states of plain optimizers, or of distributed ones, into its own kind only.
    degrees = dict(theirs, use_distributed_optimizer=sharded)
    with accelerator(**degrees) as one:
        own = MegatronsOwn(one, halves=halves, sharded=sharded)
        if sharded:
            own.train([5])  # without Apex, megatron-core's distributed optimizer describes no state before a step
        own.load(tmp_path / "saved")
        assert_same_weights(own.train([2]), expected, halves=halves)


@pytest.mark.ranks(2)
def test_folders_whose_states_do_not_fit_are_refused_on_every_rank(rank, tmp_path):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of

    from accel_megatron import load_folder, save_folder
    from accel_state.errors import CheckpointError

    with accelerator(**SHARDED) as one:
        own = MegatronsOwn(one, sharded=True)
        own.metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        own.train([0])
        own.save(tmp_path / "buffers")
    with accelerator(pp_degree=2) as one:
        source = make_model("llama")
        model, optimizer = one.prepare(source, optimizer_of(source))
        save_folder(model, tmp_path / "begun")
        before = stepped(one, model, optimizer, [0])
        save_folder(model, tmp_path / "weights", optimizer=False)
        states = states_of(one, model, optimizer)
        with pytest.raises(CheckpointError, match="nearest: write it with --dist-ckpt-optim-fully-reshardable"):
            load_folder(model, tmp_path / "buffers", trust_pickle=True)
        with pytest.raises(CheckpointError, match=r"has no states .*nearest: load_folder\(\.\.\., optimizer=False\)"):
            load_folder(model, tmp_path / "weights", trust_pickle=True)
        stepped(one, model, optimizer, [1])
        states = states_of(one, model, optimizer)
        load_folder(model, tmp_path / "weights", optimizer=False, trust_pickle=True)
        assert largest_difference(one.get_state_dict(model), before) == 0
        assert_same_states(states_of(one, model, optimizer), states)
        load_folder(model, tmp_path / "begun", trust_pickle=True)  # saved before the first step
        assert not any(states_of(one, model, optimizer)["state"].values())
        assert largest_difference(stepped(one, model, optimizer, [0]), before) == 0
    with accelerator(tp_degree=2) as one:
        source = make_model("llama")
        model, optimizer = one.prepare(source, torch.optim.NAdam(source.parameters()))
        stepped(one, model, optimizer, [0])
        with pytest.raises(CheckpointError, match=r"'mu_product' of NAdam has another shape .*nearest: save_folder"):
            save_folder(model, tmp_path / "refused")
        with pytest.raises(CheckpointError, match="its groups differ"):
            load_folder(model, tmp_path / "begun", trust_pickle=True)
