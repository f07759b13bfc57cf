from accel_compat.absent import install_xla as install_xla
