"""All families by name."""

from collections.abc import Iterable

from . import timm_models, transformers_models
from .catalogue import Family

FAMILIES = {
    f"{family.library}/{family.name}": family for family in (*transformers_models.FAMILIES, *timm_models.FAMILIES)
}


def family_named(name: str) -> Family:
    """Return a family by its whole name, `<library>/<name>`."""
    return FAMILIES[name]


def known_families(wanted: Iterable[str] | None) -> list[str]:
    """Return the whole names of families wanted by whole name, name or library; all, if nothing is."""
    if not wanted:
        return list(FAMILIES)
    words = set(wanted)
    found = [name for name, family in FAMILIES.items() if words & {name, family.name, family.library}]
    unknown = words - {word for name in found for word in (name, *name.split("/"))}
    if unknown:
        raise SystemExit(f"there is no family {sorted(unknown)[0]!r}; there is: {', '.join(FAMILIES)}")
    return found
