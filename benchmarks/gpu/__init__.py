"""Measurements and correctness tests on one GPU, in ten minutes: ``python -m benchmarks.gpu --out DIR``.

``--tiny`` is a test of the driver itself: it runs every section with small sizes on the CPU, where each ends as "ok" or
as "needs cuda: why".
"""
