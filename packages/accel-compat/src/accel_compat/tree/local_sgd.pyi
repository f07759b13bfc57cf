from accel.local_sgd import LocalSGD as LocalSGD
