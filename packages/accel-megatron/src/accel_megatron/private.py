"""Private names of torch that this package uses, in one place."""

from torch._C._distributed_c10d import HashStore as HashStore
