"""The one settings object: from a file, the environment and flags, in rising order of precedence.

A file is TOML or JSON and has a table a part (``[kafka]``, ``[collectors]``). The environment
spells a key ``LATENCYPRISM_KAFKA__BOOTSTRAP``, a flag ``--set kafka.bootstrap=host:9092``; lists
and tables in either are JSON.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from latencyprism.collectors.config import CollectorConfig
from latencyprism.routers.config import RouterConfig
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.sinks.config import StoreConfig
from latencyprism.streams.config import StreamsConfig

PREFIX = "LATENCYPRISM_"
SECRETS = (("kafka", "sasl_password"), ("kafka", "ssl_key"), ("store", "password"))
NOT_SETTINGS = {"LATENCYPRISM_CONFIG", "LATENCYPRISM_CACHE", "LATENCYPRISM_TRACES"}


class SettingsError(ValueError):
    """Settings that cannot be used; the text names every key, what it holds and what is allowed."""


def default_data_dir() -> Path:
    """Where state goes unless told otherwise, by the XDG base directory convention."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "latencyprism"


class Settings(BaseSettings):
    """Everything that can be set; each part documents its own fields."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    kafka: KafkaConfig = KafkaConfig()
    collectors: CollectorConfig = CollectorConfig()
    streams: StreamsConfig = StreamsConfig()
    store: StoreConfig = StoreConfig()
    router: RouterConfig = RouterConfig()
    data_dir: Path = default_data_dir()
    """Folder for the embedded broker, the embedded store and the workers' tables."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 replaced by one that reads JSON
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 no .env files
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 no secret folders
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags before the environment; the file is put behind both by :func:`load`."""
        return init_settings, _JsonEnvSource(settings_cls)


class _JsonEnvSource(EnvSettingsSource):
    """Environment variables, with JSON for lists and tables inside a part as well."""

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = _read_json(super().__call__())
        return values


def load(config: Path | None = None, overrides: Iterable[str] = ()) -> Settings:
    """Settings from the file (if any), the environment and ``key=value`` overrides.

    ``config`` None looks at ``LATENCYPRISM_CONFIG``. Raises :class:`SettingsError`.
    """
    named = config or os.environ.get("LATENCYPRISM_CONFIG")
    file = _FileSource(Path(named)) if named else InitSettingsSource(Settings, init_kwargs={})
    _check_environment()
    flags = _parse_overrides(overrides)

    class Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            sources = super().settings_customise_sources(
                settings_cls, init_settings, env_settings, dotenv_settings, file_secret_settings
            )
            return *sources, file

    try:
        return Layered(**flags)
    except ValidationError as e:
        lines = [_explain(problem, flags) for problem in e.errors()]
        raise SettingsError("\n".join(lines)) from e


def dump(settings: Settings, *, secrets: bool) -> str:
    """The settings as JSON that :func:`load` reads back; without secrets those are starred."""
    values = TypeAdapter(Settings).dump_python(settings, mode="json")
    if not secrets:
        for part, key in SECRETS:
            if values[part][key]:
                values[part][key] = "***"
    return json.dumps(values, indent=2)


def write(settings: Settings, folder: Path) -> Path:
    """Write the settings, secrets included, where only this user can read them, for children."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    path.touch(mode=0o600)
    path.write_text(dump(settings, secrets=True))
    return path


def _FileSource(path: Path) -> PydanticBaseSettingsSource:  # noqa: N802 chooses between two classes
    kinds = {".toml": TomlConfigSettingsSource, ".json": JsonConfigSettingsSource}
    kind = kinds.get(path.suffix)
    if kind is None:
        raise SettingsError(f"settings file {path}: ends in neither .toml nor .json")
    if not path.is_file():
        raise SettingsError(f"settings file {path}: there is no such file")
    try:
        source: PydanticBaseSettingsSource = kind(Settings, path)
    except (ValueError, OSError, RecursionError) as e:
        raise SettingsError(f"settings file {path}: {e}") from e
    return source


def _check_environment() -> None:
    for name in os.environ:
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            part = name.removeprefix(PREFIX).split("__")[0].lower()
            if part not in Settings.model_fields:
                allowed = ", ".join(Settings.model_fields)
                raise SettingsError(f"environment {name}: no part {part!r}; there are {allowed}")


def _parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise SettingsError(
                f"--set {override}: give it as key=value, such as kafka.prefix=test"
            )
        *path, last = key.split(".")
        inner = values
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = _read_json(value)
    return values


def _read_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _read_json(inner) for key, inner in value.items()}
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _explain(problem: Any, flags: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    env = PREFIX + "__".join(path).upper()
    where = f"environment {env}" if env in os.environ else "settings file"
    inner: Any = flags
    for part in path:
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    if inner is not None:
        where = "--set"
    message = problem["msg"].removeprefix("Input should be ")
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{'.'.join(path)}: there is no such setting (from {where})"
    # A secret is wrong by its type alone, such as digits without quotes, and stands in logs then.
    shown = "what it holds" if tuple(path[:2]) in SECRETS else repr(problem["input"])
    return f"{'.'.join(path)}: {shown} is not {message} (from {where})"
