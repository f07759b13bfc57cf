"""Ratios of what accel costs to what raw PyTorch, or the machine, costs; never a time by itself.

Each benchmark measures its variants in turn in one run and prints medians, a table and (``--json FILE``) JSON:

    hatch run bench step_overhead
    hatch run peers:bench step_overhead --peers
"""
