"""Reads rows of tables of published runs as models, clusters, jobs and layouts."""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.validation.rows._cases import (
        CONVERSATIONS,
        COPIES_TO_HOST,
        Case,
        RowWithRun,
        cluster_of,
        framework_of,
        read_case,
        read_runs,
        rows_with_runs,
    )
    from perfmodel.validation.rows._cells import (
        Row,
        Unusable,
        count,
        missing_column,
        number,
        read_rows,
        read_tables,
        text,
        with_heads,
    )
    from perfmodel.validation.rows._keys import rows_of, with_plain_columns
    from perfmodel.validation.rows._layout_words import schedule_of
    from perfmodel.validation.rows._model import model_of, open_shapes
    from perfmodel.validation.rows._own_runs import own_fields
    from perfmodel.validation.rows._recipe import recipe_of, with_shards_of_recipe
    from perfmodel.validation.rows._words import (
        framework_name,
        layout_switches,
        names_dtype,
        seq_len_of,
        unread_words,
    )

__getattr__, __dir__ = lazy_names(__name__)
