"""The messages of the TPU runtime's metric service, as far as they are read here.

Names, numbers and types of the fields are those of the service's public definition
(``tpu.monitoring.runtime``); fields left out are skipped when a message is parsed.
"""

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "tpu.monitoring.runtime"
GET_METRIC: Final = f"/{PACKAGE}.RuntimeMetricService/GetRuntimeMetric"

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_DOUBLE = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE

_FIELDS: Final[dict[str, tuple[tuple[str, int, Any], ...]]] = {
    "MetricRequest": (("metric_name", 1, _STRING),),
    "MetricResponse": (("metric", 1, "TPUMetric"),),
    "TPUMetric": (("name", 1, _STRING), ("metrics", 3, "Metric")),
    "Metric": (("attribute", 1, "Attribute"), ("gauge", 3, "Gauge")),
    "Attribute": (("key", 1, _STRING), ("value", 2, "AttrValue")),
    "AttrValue": (("string_attr", 1, _STRING), ("int_attr", 3, _INT64)),
    "Gauge": (("as_double", 1, _DOUBLE), ("as_int", 2, _INT64)),
}
"""Message → name, number and type of its fields; a type in words is another message."""
_REPEATED: Final = frozenset((("TPUMetric", "metrics"),))
_ONE_OF: Final = {"AttrValue": "attr", "Gauge": "value"}
"""Messages of whose fields one is set."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="latencyprism/tpu_metrics.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[name])
        for field_name, number, kind in fields:
            repeated = (name, field_name) in _REPEATED
            field = message.field.add(
                name=field_name,
                number=number,
                label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
                type=_MESSAGE if isinstance(kind, str) else kind,
            )
            if isinstance(kind, str):
                field.type_name = f".{PACKAGE}.{kind}"
            if name in _ONE_OF:
                field.oneof_index = 0
    return file


# A pool of its own: in a process that has Google's generated code, the default one knows the names.
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


MetricRequest = _message("MetricRequest")
MetricResponse = _message("MetricResponse")
