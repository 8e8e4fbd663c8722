"""The typed records and the Avro files are one contract."""

import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal

import pytest

from latencyprism.schemas import avro
from latencyprism.schemas.topics import TOPICS

PRIMITIVES = {
    "string": str,
    "int": int,
    "long": int,
    "double": float,
    "boolean": bool,
    "bytes": bytes,
}
RECORDS = [topic.record for topic in TOPICS]


def python_type(schema: Any, named: dict[str, Any]) -> Any:
    """Shape of a Python annotation for an Avro type, comparable with ``annotation_shape``."""
    if isinstance(schema, list):
        assert schema[0] == "null"
        return ("optional", python_type(schema[1], named))
    if isinstance(schema, str):
        return PRIMITIVES.get(schema) or named[schema]
    if schema["type"] == "array":
        return ("array", python_type(schema["items"], named))
    if schema["type"] == "map":
        return ("map", python_type(schema["values"], named))
    if schema["type"] == "enum":
        named[schema["name"]] = ("enum", tuple(schema["symbols"]))
        return named[schema["name"]]
    assert schema["type"] == "record"
    named[schema["name"]] = ("record", schema["name"])
    for field in schema["fields"]:
        python_type(field["type"], named)
    return named[schema["name"]]


def annotation_shape(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in arguments:
        (inner,) = (part for part in arguments if part is not type(None))
        return ("optional", annotation_shape(inner))
    if origin is tuple:
        assert arguments[1] is ...
        return ("array", annotation_shape(arguments[0]))
    if origin is Mapping:
        assert arguments[0] is str
        return ("map", annotation_shape(arguments[1]))
    if origin is Literal:
        return ("enum", arguments)
    return ("record", hint.__name__) if isinstance(hint, type) and is_dataclass(hint) else hint


def nested_records(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [found for part in schema for found in nested_records(part)]
    if not isinstance(schema, dict):
        return []
    if schema["type"] == "record":
        return [schema] + [f for field in schema["fields"] for f in nested_records(field["type"])]
    return nested_records(schema.get("items") or schema.get("values"))


def all_records() -> list[tuple[dict[str, Any], type[Any]]]:
    from latencyprism.schemas import records

    return [
        (schema, getattr(records, schema["name"]))
        for record in RECORDS
        for schema in nested_records(avro.record_schema(record))
    ]


@pytest.mark.parametrize(
    ("schema", "record"), all_records(), ids=lambda v: getattr(v, "__name__", "")
)
def test_record_equals_its_schema(schema: dict[str, Any], record: type[Any]) -> None:
    hints = typing.get_type_hints(record)
    named: dict[str, Any] = {}

    expected = [(field["name"], python_type(field["type"], named)) for field in schema["fields"]]

    assert expected == [
        (field.name, annotation_shape(hints[field.name])) for field in fields(record)
    ]


@pytest.mark.parametrize(
    ("schema", "record"), all_records(), ids=lambda v: getattr(v, "__name__", "")
)
def test_defaults_agree(schema: dict[str, Any], record: type[Any]) -> None:
    def default(field: Any) -> Any:
        if field.default_factory is not MISSING:
            return field.default_factory()
        return [] if field.default == () else field.default

    expected = {f["name"]: f["default"] for f in schema["fields"] if "default" in f}

    assert expected == {f.name: default(f) for f in fields(record) if default(f) is not MISSING}


@pytest.mark.parametrize(
    ("schema", "record"), all_records(), ids=lambda v: getattr(v, "__name__", "")
)
def test_every_field_says_what_it_means(schema: dict[str, Any], record: type[Any]) -> None:
    assert schema["doc"]
    for field in schema["fields"]:
        assert len(field["doc"]) > 8, field["name"]
        if field["name"] in hints_with_none(record):
            assert "null" in field["doc"], field["name"]


def hints_with_none(record: type[Any]) -> set[str]:
    hints = typing.get_type_hints(record)
    return {name for name, hint in hints.items() if type(None) in typing.get_args(hint)}
