"""Renders the conda recipe as rattler-build does before it solves and builds, and prints what it would build.

    hatch run recipe:check

Fails on fields that recipes do not have and on requirements that are no conda specifications. Nothing is downloaded.
"""

import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parent / "conda" / "recipe.yaml"


def rendered(recipe: Path) -> dict[str, object]:
    """The one package of a recipe, for Linux on x86-64."""
    from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

    platform = PlatformConfig(target_platform="linux-64", build_platform="linux-64", host_platform="linux-64")
    (variant,) = Stage0Recipe.from_file(recipe).render(VariantConfig(), RenderConfig(platform=platform))
    return dict(variant.recipe.to_dict())


def main() -> int:
    facts = rendered(RECIPE)
    for part in ("package", "build", "requirements"):
        print(part, facts[part])
    return 0


if __name__ == "__main__":
    sys.exit(main())
