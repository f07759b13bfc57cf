from accel.utils.versions import compare_versions as compare_versions
from accel.utils.versions import is_torch_version as is_torch_version
