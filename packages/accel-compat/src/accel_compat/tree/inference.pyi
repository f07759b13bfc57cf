from accel_compat.absent import build_pipeline as build_pipeline
from accel_compat.absent import find_pippy_batch_size as find_pippy_batch_size
from accel_compat.absent import generate_device_map as generate_device_map
from accel_compat.absent import pippy_forward as pippy_forward
from accel.inference import prepare_pippy as prepare_pippy
