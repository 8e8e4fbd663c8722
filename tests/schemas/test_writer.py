import io
from types import SimpleNamespace
from typing import Any

import pytest
from fastavro import schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from latencyprism.schemas import avro
from latencyprism.schemas.topics import TOPICS, Topic
from latencyprism.schemas.writer import compile_writer, encode_long

INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "int": INTS,
    "long": LONGS,
    "string": st.text(max_size=100),
    "double": st.floats(allow_nan=False) | INTS,
    "boolean": st.booleans(),
    "bytes": st.binary(max_size=100),
}


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Values as fastavro takes them."""
    if isinstance(schema, list):
        return st.one_of([values(branch) for branch in schema])
    kind = schema["type"] if isinstance(schema, dict) else schema
    match kind:
        case "record":
            fields = {field["name"]: values(field["type"]) for field in schema["fields"]}
            return st.fixed_dictionaries(fields)
        case "enum":
            return st.sampled_from(schema["symbols"])
        case "array":
            return st.lists(values(schema["items"]), max_size=3)
        case "map":
            return st.dictionaries(st.text(max_size=5), values(schema["values"]), max_size=3)
    return PRIMITIVES[kind]


def record(value: Any, schema: Any) -> Any:
    """The same, its records with attributes."""
    if isinstance(schema, list):
        return None if value is None else record(value, schema[1])
    match schema["type"] if isinstance(schema, dict) else schema:
        case "record":
            fields = {f["name"]: record(value[f["name"]], f["type"]) for f in schema["fields"]}
            return SimpleNamespace(**fields)
        case "array":
            return tuple(record(item, schema["items"]) for item in value)
    return value


def by_fastavro(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    schemaless_writer(out, schema, value, strict=True)
    return out.getvalue()


def written(schema: Any, value: Any) -> bytes:
    return compile_writer(schema)(value)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_bytes_are_those_of_fastavro(topic: Topic) -> None:
    schema = avro.parse(avro.message_schema(topic))

    @given(value=values(schema))
    def check(value: Any) -> None:
        assert written(schema, record(value, schema)) == by_fastavro(schema, value)

    check()


@pytest.mark.parametrize("number", [0, -1, 63, 64, -64, -65, 2**31 - 1, 2**63 - 1, -(2**63)])
def test_whole_numbers(number: int) -> None:
    assert encode_long(number) == by_fastavro("long", number)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ("int", 2**31),
        ("int", 1.0),
        ("int", True),
        ("long", 2**63),
        ("long", "1"),
        ("long", None),
        ("double", "1"),
        ("double", True),
        ("string", b"a"),
        ("string", 1),
        ("string", None),
        ("string", "\ud800"),
        ("boolean", 1),
        ("bytes", "a"),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, "b"),
        ({"type": "array", "items": "string"}, "ab"),
        ({"type": "array", "items": "int"}, 3),
        ({"type": "map", "values": "int"}, {1: 1}),
        (["null", "int"], "a"),
    ],
)
def test_what_does_not_fit_is_refused(schema: Any, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError)):
        written(schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        ["int", "null"],
        ["null", "int", "string"],
        {"type": "fixed", "name": "F", "size": 4},
        {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]},
        "unknown",
    ],
)
def test_schemas_of_other_shapes_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="no writer"):
        compile_writer(schema)


def test_named_type_is_known_again() -> None:
    enum = {"type": "enum", "name": "E", "symbols": ["a", "b"]}
    fields = [{"name": "one", "type": enum}, {"name": "two", "type": ["null", "E"]}]
    schema = avro.parse({"type": "record", "name": "R", "fields": fields})

    assert written(schema, SimpleNamespace(one="b", two="a")) == b"\x02\x02\x00"
