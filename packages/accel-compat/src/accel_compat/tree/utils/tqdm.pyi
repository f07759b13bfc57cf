from accel.utils.imports import is_tqdm_available as is_tqdm_available
from accel_state.progress import tqdm as tqdm
