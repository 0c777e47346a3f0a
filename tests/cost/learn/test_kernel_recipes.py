"""Recipes: the shipped ones are readable, strange ones are refused."""

from pathlib import Path

import pytest

from perfmodel.cost.learn import kernel_records
from perfmodel.cost.learn.training import Recipe, read_recipe
from perfmodel.errors import CalibrationError, UnknownNameError
from perfmodel.ops import FAMILIES

RECIPES = Path(__file__).parents[3] / "training" / "recipes"


def test_shipped_weights_were_fitted_by_these_recipes() -> None:
    records = kernel_records()
    recipes = {p.stem: read_recipe(p) for p in RECIPES.glob("*.toml")}
    assert set(records) == set(recipes)
    # recurrences by chunks are in no table: priced by the roofline and their vector lanes
    assert {r.family for r in recipes.values()} == set(FAMILIES) - {"recurrence"}
    studied = {name: record for name, record in records.items() if "recipe" in record}
    assert studied
    for name, record in studied.items():
        assert Recipe.from_dict(record["recipe"]) == recipes[name], name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 'x'", "family"),
        ("name = 'x'\nfamily = 'gemm'\nstepz = 1", "stepz"),
        ("name = ", "not a readable recipe"),
        ("name = 'x'\nfamily = 'gemm'\nsteps = 0", "steps"),
    ],
)
def test_strange_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        read_recipe(path)


def test_unknown_family_is_named() -> None:
    with pytest.raises(UnknownNameError, match="gem"):
        Recipe(name="x", family="gem")
