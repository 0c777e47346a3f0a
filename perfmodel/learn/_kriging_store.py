"""Kriging to and from named arrays: categories as integer codes into one list of names."""

from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel.learn._kriging import Component, Kriging, Points
from perfmodel.learn._kriging_hyper import pack, unpack


def kriging_arrays(kriging: Kriging) -> tuple[dict[str, np.ndarray], list[str]]:
    """Named arrays and the names that the category codes refer to."""
    columns = list(kriging.points.categories.values())
    names, codes = np.unique(np.concatenate(columns).astype(str), return_inverse=True)
    arrays = {
        "hyper": pack(kriging.hyper),
        "codes": codes.reshape(len(columns), -1).astype(np.int32),
        "coordinates": np.stack(list(kriging.points.coordinates.values())),
        "unrest": kriging.points.unrest,
        "weight": kriging.weight,
    }
    return arrays, names.tolist()


def kriging_of(
    components: Sequence[Component],
    categories: Sequence[str],
    coordinates: Sequence[str],
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
) -> Kriging:
    """Inverse of `kriging_arrays`; `categories` and `coordinates` name the stored columns in order."""
    text = np.array(names, dtype=object)
    points = Points(
        {name: text[codes] for name, codes in zip(categories, arrays["codes"], strict=True)},
        dict(zip(coordinates, arrays["coordinates"], strict=True)),
        arrays["unrest"],
    )
    return Kriging(tuple(components), unpack(components, arrays["hyper"]), points, arrays["weight"])
