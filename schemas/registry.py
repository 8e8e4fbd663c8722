"""Schema registries: Confluent's protocol over HTTP, and its twin in memory."""

import json
from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

NOT_FOUND = 404


class ConfluentRegistry:
    """A registry that speaks Confluent's REST protocol. Calls block; the codec makes few."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = SchemaRegistryClient({"url": url})

    def register(self, subject: str, schema: dict[str, Any]) -> int:
        """Id of the schema under the subject. Raises OSError when it is away or refuses."""
        try:
            return int(self._client.register_schema(subject, Schema(json.dumps(schema), "AVRO")))
        except Exception as e:  # the client raises its HTTP library's errors as they are
            raise self._error(f"register {subject}", e) from e

    def schema(self, schema_id: int) -> dict[str, Any] | None:
        """Schema of the id; None when the registry has none. Raises OSError when it is away."""
        try:
            text = self._client.get_schema(schema_id).schema_str
        except SchemaRegistryError as e:
            if e.http_status_code == NOT_FOUND:
                return None
            raise self._error(f"read schema {schema_id}", e) from e
        except Exception as e:
            raise self._error(f"read schema {schema_id}", e) from e
        parsed = json.loads(text or "null")
        return parsed if isinstance(parsed, dict) else None

    def _error(self, what: str, error: Exception) -> OSError:
        return OSError(f"schema registry {self._url}: cannot {what}: {error}")


class MemoryRegistry:
    """A registry in memory, for tests and single processes."""

    def __init__(self) -> None:
        self._schemas: dict[int, dict[str, Any]] = {}

    def register(self, subject: str, schema: dict[str, Any]) -> int:  # noqa: ARG002 protocol
        """Id of the schema, the same for every subject that registers it."""
        for schema_id, known in self._schemas.items():
            if known == schema:
                return schema_id
        self._schemas[len(self._schemas) + 1] = schema
        return len(self._schemas)

    def schema(self, schema_id: int) -> dict[str, Any] | None:
        """Schema of the id, None if there is none."""
        return self._schemas.get(schema_id)
