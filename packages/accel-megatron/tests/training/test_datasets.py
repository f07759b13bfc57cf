"""Megatron-LM's own data sets: written, read and sharded here. On CPU ranks, under the tests' stand-in for CUDA."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

LENGTH = 12


class Tokens:
    """A tokenizer of numbers."""

    vocab_size, eod, pad = 64, 0, -1

    def __init__(self):
        self.unique_identifiers = {"class": "Tokens"}


def write_documents(prefix):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        builder.add_document(torch.cat([torch.randint(1, 64, (20,), generator=generator), torch.tensor([0])]), [21])
    builder.finalize(f"{prefix}.idx")


def loss_in_one_process(model, batch):
    import torch

    logits = model(batch["tokens"]).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    return (losses * mask).sum() / mask.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"pp_degree": 2, "num_micro_batches": 2}])
def test_each_replica_trains_on_its_samples_as_one_process_on_all(rank, tmp_path, options):
    import torch
    from loops import accelerator, largest_difference, make_model, optimizer_of

    from accel_megatron import MegatronLMDummyDataLoader

    with accelerator(**options) as one:
        if one.is_main_process:
            write_documents(tmp_path / "text_document")
        one.wait_for_everyone()
        dummy = MegatronLMDummyDataLoader(
            data_path=str(tmp_path / "text_document"),
            split="80,20,0",
            seq_length=LENGTH,
            micro_batch_size=4 // options.get("num_micro_batches", 1),
            train_val_test_num_samples=(24, 8, 0),
            tokenizer=Tokens(),
            data_cache_path=str(tmp_path / "cache"),
            eod_mask_loss=True,
        )
        train, valid, test = dummy.loaders(one.backend.config)
        assert test is None
        assert len(valid.dataset) == 8
        plain = list(train)
        assert all(batch["tokens"].shape == (4, LENGTH) for batch in plain)
        expected = make_model("llama").double()
        updates = optimizer_of(expected)
        replicas = 2 if not options else 1
        for step in range(0, len(plain), replicas):
            for batch in plain[step : step + replicas]:
                (loss_in_one_process(expected, batch) / replicas).backward()
            updates.step()
            updates.zero_grad()
        source = make_model("llama")
        model, optimizer, loader = one.prepare(source, optimizer_of(source), train)
        seen = []
        for batch in loader:
            seen.append(batch["tokens"])
            one.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        mine = [batch["tokens"] for batch in plain[(rank if replicas == 2 else 0) :: replicas]]
        assert len(seen) == len(mine) == len(plain) // replicas
        assert all(torch.equal(one, other) for one, other in zip(seen, mine, strict=True))
        assert largest_difference(one.get_state_dict(model), expected.state_dict()) < 1e-5


@pytest.mark.ranks(1)
def test_own_datasets_come_from_the_plugins_function(rank):
    from loops import accelerator, make_model, samples

    from accel_megatron import MegatronLMDummyDataLoader
    from accel_state.errors import ConfigError

    asked = []

    def provider(sizes):
        asked.append(sizes)
        batch = samples(0, 0, count=8)
        train = [{name: value[number] for name, value in batch.items()} for number in range(8)]
        return train, train[:2], None

    with accelerator(custom_megatron_datasets_provider_function=provider, num_micro_batches=2) as one:
        dummy = MegatronLMDummyDataLoader(micro_batch_size=2, train_val_test_num_samples=(8, 2, 0))
        train, valid, test = dummy.loaders(one.backend.config)
        assert (asked, len(train), len(valid), test) == ([(8, 2, 0)], 2, 1, None)
        model, loader = one.prepare(make_model("llama"), train)
        losses = [float(model(**batch).loss) for batch in loader]
        plain = make_model("llama")
        assert losses == pytest.approx([float(plain(**batch).loss) for batch in train], abs=1e-5)
        with pytest.raises(ConfigError, match=r"nearest: train, valid, test = dummy\.loaders"):
            next(iter(dummy))
    with accelerator() as one, pytest.raises(ConfigError, match="needs data_path for a GPTDataset"):
        dummy.loaders(one.backend.config)
    with pytest.raises(ConfigError, match="data_paths='x' is no option"):
        MegatronLMDummyDataLoader(data_paths="x")
