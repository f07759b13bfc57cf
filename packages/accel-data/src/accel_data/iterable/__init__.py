"""Iterable datasets behind a prepared loader: shared by ranks and workers, resumed, resharded.

- ``capabilities``: what a dataset can do, and the strategy that follows from it with its promise.
- ``source``, ``epoch``: the batches of one rank, and one pass over them.
- ``worker``: what runs where the dataset is read. ``stride``: the part of a stream that one reader keeps.
- ``resume``, ``reshard``: the position of a stream, and the rest of an epoch that other readers left.
- ``lockstep``: equally many steps on every rank.
"""
