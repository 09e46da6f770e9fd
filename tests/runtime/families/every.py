"""All families by name."""

from . import timm_models, transformers_models
from .catalogue import Family

FAMILIES = {
    f"{family.library}/{family.name}": family for family in (*transformers_models.FAMILIES, *timm_models.FAMILIES)
}


def family_named(name: str) -> Family:
    """Return a family by its whole name, `<library>/<name>`."""
    return FAMILIES[name]
