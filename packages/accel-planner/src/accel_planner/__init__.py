"""Predicts memory, traffic and order of speed of every way to train a model, and chooses one.

from accel_planner import Hardware, choose, optimizer_facts, plan_all, profile_model
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
