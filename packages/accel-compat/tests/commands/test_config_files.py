"""Files of ``accelerate config`` as objects."""

import pytest

from accel_compat.commands.config_files import ClusterConfig, SageMakerConfig, load_config_from_file, write_basic_config


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_written_file_is_read_as_it_was(tmp_path, ending):
    config = ClusterConfig(
        "LOCAL_MACHINE", "FSDP", "bf16", False, False, num_processes=2, fsdp_config={"fsdp_version": 2}
    )
    path = tmp_path / f"settings.{ending}"
    getattr(config, f"to_{ending}_file")(path)
    assert load_config_from_file(str(path)) == config


def test_an_old_file_has_todays_names(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: NO\nfp16: true\ndynamo_backend: INDUCTOR\n")
    config = load_config_from_file(path)
    assert (config.distributed_type, config.mixed_precision, config.num_processes) == ("NO", "fp16", 1)
    assert config.dynamo_config == {"dynamo_backend": "INDUCTOR"}


def test_a_file_of_sagemaker_is_read(tmp_path):
    path = tmp_path / "cloud.yaml"
    path.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nmixed_precision: fp16\n"
        "ec2_instance_type: A\niam_role_name: B\n"
    )
    config = load_config_from_file(path)
    assert isinstance(config, SageMakerConfig)
    assert (config.ec2_instance_type, config.distributed_type.value) == ("A", "NO")


def test_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("distributed_type: 'NO'\nnum_gpu: 2\n")
    with pytest.raises(ValueError, match="num_gpu"):
        load_config_from_file(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_config_from_file(tmp_path / "none.yaml")


def test_basic_settings_are_written_once(tmp_path):
    path = write_basic_config("bf16", tmp_path / "a" / "basic.json")
    assert load_config_from_file(path).mixed_precision == "bf16"
    assert write_basic_config("no", path) is False
    with pytest.raises(ValueError, match="int8"):
        write_basic_config("int8", tmp_path / "b.json")
