"""Docstrings under the fields of sections, the only source for ``--help``, errors and the JSON Schema.

Pydantic can collect them (``use_attribute_docstrings``), but does so for every class on import, which costs every command
50 ms.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


@cache
def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Return field name -> documentation in one line, from docstrings and ``Field(description=...)``."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if issubclass(base, BaseModel) and base is not BaseModel:
            docs |= field_docs(base)
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):  # a class without a source file
        definition = ast.ClassDef(name=cls.__name__, bases=[], keywords=[], body=[], decorator_list=[])
    assert isinstance(definition, ast.ClassDef)
    for statement, following in pairwise(definition.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    described = {name: field.description for name, field in cls.model_fields.items() if field.description}
    return {name: doc for name, doc in (docs | described).items() if name in cls.model_fields}
