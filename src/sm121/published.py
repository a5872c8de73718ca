"""What others' programs read: JSON text of our reports, and the schema that they follow.

Each report is a dataclass or pydantic model with a schema_version; its schema lies beside it as a
file and is tested to be equal to what the types give.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def report_text(report: DataclassInstance) -> str:
    """A report as JSON text."""
    return json.dumps(dataclasses.asdict(report), indent=1) + "\n"


def schema_text_of(model: type[Any]) -> str:
    """The JSON schema (2020-12) of a model, keys by their aliases."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **TypeAdapter(model).json_schema(by_alias=True),
    }
    return json.dumps(schema, indent=2) + "\n"
