from accel_megatron._version import __version__ as __version__
from accel_megatron.backend import MegatronBackend as MegatronBackend
from accel_megatron.config import MegatronConfig as MegatronConfig
from accel_megatron.config import MegatronLMPlugin as MegatronLMPlugin
from accel_megatron.conversion.state import from_megatron as from_megatron
from accel_megatron.conversion.state import to_megatron as to_megatron
from accel_megatron.training.folders import load_folder as load_folder
from accel_megatron.training.folders import save_folder as save_folder
