"""Names that DeepSpeed's users write into their scripts; DeepSpeed itself is imported where it is used."""

from accel_backends.deepspeed_dummies import DummyOptim as DummyOptim
from accel_backends.deepspeed_dummies import DummyScheduler as DummyScheduler
from accel_backends.deepspeed_json import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel_backends.deepspeed_optimizers import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
