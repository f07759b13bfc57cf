"""Table of accelerator products: memory and rates of their data sheets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

_GB, _GIB = 10**9, 2**30


@final
@dataclass(frozen=True, slots=True)
class Product:
    """Data-sheet facts of one accelerator.

    Attributes:
        memory: bytes that a process can use.
        flops: dense bf16 FLOP/s (fp16 on devices without bf16); a multiply-add counts as two.
        link: bytes a second to other devices of the node, in one direction. NVLink bridges, which join pairs of cards,
            do not count.
        kind: device type.
    """

    memory: int
    flops: float
    link: float
    kind: str = "cuda"


PRODUCTS: Mapping[str, Product] = {
    "V100": Product(32 * _GIB, 125e12, 150 * _GB),
    "T4": Product(15 * _GIB, 65e12, 16 * _GB),
    "A10G": Product(23 * _GIB, 70e12, 32 * _GB),
    "L4": Product(23 * _GIB, 121e12, 32 * _GB),
    "L40": Product(45 * _GIB, 181e12, 32 * _GB),
    "L40S": Product(45 * _GIB, 362e12, 32 * _GB),
    "A100-40GB": Product(39 * _GIB, 312e12, 300 * _GB),
    "A100": Product(79 * _GIB, 312e12, 300 * _GB),
    "H100": Product(79 * _GIB, 989e12, 450 * _GB),
    "H100-PCIE": Product(79 * _GIB, 756e12, 64 * _GB),
    "H100-NVL": Product(93 * _GIB, 835e12, 64 * _GB),
    "H200": Product(139 * _GIB, 989e12, 450 * _GB),
    "GH200": Product(94 * _GIB, 989e12, 450 * _GB),
    "B200": Product(178 * _GIB, 2250e12, 900 * _GB),
    "GB200": Product(184 * _GIB, 2250e12, 900 * _GB),
    "MI250X": Product(63 * _GIB, 191.5e12, 50 * _GB),
    "MI300X": Product(191 * _GIB, 1307e12, 448 * _GB),
    "TPU-V4": Product(32 * _GIB, 275e12, 150 * _GB, "xla"),
    "TPU-V5E": Product(16 * _GIB, 197e12, 100 * _GB, "xla"),
    "TPU-V5P": Product(95 * _GIB, 459e12, 300 * _GB, "xla"),
    "TPU-V6E": Product(32 * _GIB, 918e12, 224 * _GB, "xla"),
}
"""Products by name, words joined by hyphens. An MI250X counts as the two devices that torch shows of it."""


def product_of(name: str) -> Product | None:
    """Returns the product of a device's name; None for others, and for a slice (MIG) of one.

    The name has to hold all words of the product's: an L40S is no L4. The product with the most words counts.
    """
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if "MIG" in words:
        return None
    known = [product for product in PRODUCTS if words.issuperset(product.split("-"))]
    return PRODUCTS[max(known, key=lambda product: product.count("-"))] if known else None
