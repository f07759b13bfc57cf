"""Subcommands of ``accelerate`` as functions with argparse's namespaces."""

import importlib
import json

import pytest

from accel_compat.commands.hub_models import local_model

transformers = pytest.importorskip("transformers")


def functions(module, name, command=None):
    """Parser and function of a command, and their module."""
    found = importlib.import_module(f"accelerate.commands.{module}")
    return getattr(found, f"{name}_parser")(), getattr(found, command or name), found


def test_memory_of_a_model_by_dtype(tmp_path, capsys):
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config.save_pretrained(tmp_path)
    parser, command, module = functions("estimate", "estimate_command")
    args = parser.parse_args([str(tmp_path), "--dtypes", "float32", "int8"])
    (_, largest, total, training), (name, _, quarter, untrained) = module.gather_data(args)
    assert (name, untrained) == ("int8", None)
    assert 0 < largest < total == 4 * quarter
    assert training["step"] == 4 * total
    command(args)
    assert "float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["bert", "--dtypes", "int8"],
        ["--library_name", "transformers", "bert"],
        ["--dtypes=int8", "--trust-remote-code", "bert"],
    ],
    ids=["first", "after a value", "after a flag"],
)
def test_a_model_of_the_hub_is_found_among_the_options(words, monkeypatch):
    asked = []

    def from_pretrained(name, **_):
        asked.append(name)
        return transformers.BertConfig()

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with local_model(words) as given:
        assert asked == ["bert"]
        assert [one for one, before in zip(given, words, strict=True) if one != before] == [given[words.index("bert")]]


def test_commands_of_a_pod_are_printed(capsys):
    parser, command, _ = functions("tpu", "tpu_command", "tpu_command_launcher")
    words = ["--tpu_name", "pod", "--tpu_zone", "z", "--command", "ls", "--command", "echo hi", "--debug"]
    command(parser.parse_args(words))
    assert "ssh pod --zone z --command cd /usr/share; ls; echo hi --worker all" in capsys.readouterr().out


def test_settings_of_fsdp_1_become_those_of_fsdp_2(tmp_path):
    parser, command, module = functions("to_fsdp2", "to_fsdp2_command")
    source, target = tmp_path / "one.json", tmp_path / "two.yaml"
    source.write_text(json.dumps({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "mine": 1}}))
    command(parser.parse_args(["--config_file", str(source), "--output_file", str(target)]))
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "mine": 1}
    assert module.load_config(target)["fsdp_config"] == section
    with pytest.raises(FileExistsError):
        command(parser.parse_args(["--config_file", str(source), "--output_file", str(target)]))


def test_a_file_that_cannot_be_written_over_stays_as_it_was(tmp_path):
    parser, command, _ = functions("to_fsdp2", "to_fsdp2_command")
    source = tmp_path / "one.yaml"
    source.write_text("fsdp_config: {fsdp_version: 1}\n")
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(ValueError, match=r"cannot write .*folder"):
        command(parser.parse_args(["--config_file", str(source), "--output_file", str(target), "--overwrite"]))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "one.yaml"]


def test_replacing_a_name_of_such_a_module_has_an_effect(monkeypatch, caplog, tmp_path):
    parser, command, module = functions("to_fsdp2", "to_fsdp2_command")
    monkeypatch.setattr(module, "load_config", lambda file: {"fsdp_config": {"fsdp_version": 2}})
    command(parser.parse_args(["--config_file", "none", "--output_file", str(tmp_path / "out.yaml")]))
    assert "already specifies FSDP2" in caplog.text
