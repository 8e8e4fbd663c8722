"""Finds where an engine tells of itself, and asks there."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from latencyprism.collectors.address import endpoint, instance_of
from latencyprism.collectors.engine.aliases import OLLAMA, Engine
from latencyprism.collectors.engine.client import (
    Client,
    ScrapeError,
    checked_page,
    no_token,
    parsed_json,
    token_source,
)
from latencyprism.collectors.engine.config import EngineConfig

OLLAMA_PATH = "/api/ps"
"""Names the models loaded; that is all that Ollama tells."""
PATHS = ("/metrics", "/prometheus/metrics", OLLAMA_PATH)
"""Where engines have their metrics; at the second one TensorRT-LLM, whose first one is JSON."""
NAME_CHARS = 200
"""Longest version, and longest list of models, that is taken."""


@dataclass(frozen=True, slots=True)
class Told:
    """What an engine told: a metrics page, or that it is one without, and of which models."""

    page: bytes = b""
    without_page: Engine | None = None
    model: str | None = None


class Server:
    """The HTTP side of one engine; used by one thread, aborted by another."""

    def __init__(self, url: str, config: EngineConfig) -> None:
        """Raises ValueError for a URL or a setting that is wrong."""
        given = {instance_of(engine): page for engine, page in config.pages.items()}
        page_url = given.get(instance_of(url))
        token = token_source(config.token_env, config.token_file)
        if page_url is None:
            self._pages = Client(url, config.timeout_s, token=token, ssl_ca=config.ssl_ca)
            self._api = self._pages
            self._paths = (config.path,) if config.path else PATHS
        else:
            parts = urlsplit(page_url)
            where = endpoint(page_url)._replace(path="", query="", fragment="").geturl()
            self._pages = Client(where, config.timeout_s, token=token, ssl_ca=config.ssl_ca)
            # The token is the page's, and not to be shown to others.
            self._api = Client(url, config.timeout_s, token=no_token, ssl_ca=config.ssl_ca)
            path = parts.path or "/metrics"
            self._paths = (f"{path}?{parts.query}" if parts.query else path,)
        self._at = 0
        self._first: ScrapeError | None = None

    def ask(self) -> Told:
        """One request for what the engine tells; blocks. Raises ScrapeError.

        Where nothing was found, the next call looks at the next place; meanwhile the error is
        that of the first place.
        """
        path = self._paths[self._at]
        try:
            told = self._ask(path)
        except ScrapeError as error:
            if self._at == 0 or not error.elsewhere:
                self._first = error
            if error.elsewhere:
                self._at = (self._at + 1) % len(self._paths)
            raise self._first or error from error
        self._first = None
        return told

    def _ask(self, path: str) -> Told:
        answer = self._pages.get(path)
        if path != OLLAMA_PATH:
            return Told(page=checked_page(*answer))
        try:
            names = sorted(str(model["name"]) for model in parsed_json(answer.body)["models"])
        except (ScrapeError, KeyError, TypeError) as error:
            message = f"{path} names no models"
            raise ScrapeError("not_metrics", message, elsewhere=True) from error
        return Told(without_page=OLLAMA, model=",".join(names)[:NAME_CHARS] or None)

    def version(self, engine: Engine) -> str:
        """The engine's version, empty if it does not tell; blocks."""
        if engine.version_path is None:
            return ""
        try:
            version = parsed_json(self._api.get(engine.version_path).body)[engine.version_key]
        except (ScrapeError, KeyError, TypeError):
            return ""
        return version[:NAME_CHARS] if isinstance(version, str) else ""

    def abort(self) -> None:
        """Make what is under way in another thread fail at once."""
        self._pages.abort()
        self._api.abort()

    def close(self) -> None:
        """Close the connections."""
        self._pages.close()
        self._api.close()
