from accel_compat.helpers.local_sgd import CompatLocalSGD as LocalSGD
