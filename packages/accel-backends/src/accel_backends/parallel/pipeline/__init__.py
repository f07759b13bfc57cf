"""Pipeline parallelism: stages of a model, and the schedules that run them."""
