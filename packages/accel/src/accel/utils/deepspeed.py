"""Names that DeepSpeed's users import in their scripts; DeepSpeed itself is imported when they are used."""

from accel_deepspeed.config.ds_json import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel_deepspeed.config.dummies import DummyOptim as DummyOptim
from accel_deepspeed.config.dummies import DummyScheduler as DummyScheduler
from accel_deepspeed.engine.optimizers import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
