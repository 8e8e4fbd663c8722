"""chDB behind the few calls that the HTTP server makes; the only module that imports it."""

import json
import logging
import re
import tempfile
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from latencyprism.sinks.store import statement
from latencyprism.sinks.store.native import empty_block
from latencyprism.sinks.store.statement import quoted_name, quoted_text

logger = logging.getLogger(__name__)

_CODE = re.compile(r"Code: (\d+)\. ")
_SETTING = re.compile(r"[A-Za-z_]\w*")
NOT_IMPLEMENTED = 48
BAD_ARGUMENTS = 36
NOT_ENOUGH_SPACE = 243
UNKNOWN_EXCEPTION = 1002


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one store process spends at most."""

    body_bytes: Annotated[int, Ge(1)] = 64 << 20
    """Bytes of one request after decompression."""
    result_bytes: Annotated[int, Ge(1)] = 256 << 20
    """Bytes of one answer before compression; the query fails beyond it."""
    memory_bytes: Annotated[int, Ge(1)] = 4 << 30
    """Memory of one query inside the engine."""
    query_s: Annotated[float, Ge(0)] = 60.0
    """Time of one query; 0 for no end."""
    queries: Annotated[int, Ge(1)] = 8
    """Requests read and run at the same time; others wait."""
    connections: Annotated[int, Ge(1)] = 128
    """Open connections; further ones are answered 503."""


class EngineError(RuntimeError):
    """The engine refused a statement; ``code`` is ClickHouse's number."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One statement as an HTTP request brings it."""

    sql: bytes
    """The statement, and behind it the rows of an INSERT."""
    database: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    format: str = "TabSeparated"
    """Format of the answer where the statement names none."""
    readonly: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a statement gave."""

    body: bytes
    format: str | None
    """None for statements that have no result."""
    summary: Mapping[str, str]


class Engine:
    """The one chDB engine of this process on one folder; safe to call from many threads.

    Reads run side by side; writes run one after the other.
    """

    def __init__(self, directory: Path, limits: Limits) -> None:
        import chdb

        self._chdb: Any = chdb
        self._limits = limits
        self._path = str(directory / "chdb")
        self._spool = directory / "spool"
        self._spool.mkdir(parents=True, exist_ok=True)
        for left in self._spool.iterdir():
            left.unlink()
        # The engine lives as long as any handle, so this one keeps it up between requests.
        self._keeper = self._chdb.connect(self._path)
        self._writing = threading.Lock()

    def execute(self, request: Request) -> Answer:
        """Run one statement to its end; blocks. Raises :class:`EngineError`."""
        if why := statement.refusal(request.sql):
            raise EngineError(f"Code: {NOT_IMPLEMENTED}. {why}", NOT_IMPLEMENTED)
        if statement.kind(request.sql) == "read":
            return self._run(request, request.sql.decode(errors="surrogateescape"))
        with self._writing:
            insert = statement.formatted_insert(request.sql)
            if insert is None:
                return self._run(request, request.sql.decode(errors="surrogateescape"))
            return self._insert(request, insert)

    def close(self) -> None:
        """Let the engine go; waits for a write under way."""
        with self._writing:
            self._keeper.close()

    def _insert(self, request: Request, insert: statement.FormattedInsert) -> Answer:
        # Through a file: the engine's streaming insert reports success for rows that it refused.
        try:
            with tempfile.NamedTemporaryFile(dir=self._spool, suffix=".rows") as spool:
                spool.write(insert.data)
                spool.flush()
                return self._run(
                    request,
                    f"{insert.target} FROM INFILE {quoted_text(spool.name)} COMPRESSION 'none' "
                    f"{insert.settings} FORMAT {insert.format}",
                )
        except OSError as e:
            text = f"Code: {NOT_ENOUGH_SPACE}. DB::Exception: cannot spool an insert: {e}"
            raise EngineError(text, NOT_ENOUGH_SPACE) from e

    def _run(self, request: Request, sql: str) -> Answer:
        with closing(self._chdb.connect(self._path)) as handle:
            try:
                if request.database:
                    handle.query(f"USE {quoted_name(request.database)}")
                handle.query(f"SET {self._settings(request.settings)}")
                if request.readonly:
                    handle.query("SET readonly = 1")
                result = handle.query(sql, request.format, params=dict(request.parameters))
            except RuntimeError as e:  # chDB has two classes of its own by one name
                raise _engine_error(str(e)) from e
            answer = Answer(
                body=result.bytes() or b"",
                format=(
                    statement.output_format(request.sql, request.format)
                    if statement.kind(request.sql) == "read"
                    else None
                ),
                summary=_summary(result),
            )
            if answer.format == "Native" and not answer.body:
                return replace(answer, body=self._columns(handle, request))
            return answer

    def _columns(self, handle: Any, request: Request) -> bytes:
        """What Native says of an answer without rows, which chDB leaves out."""
        query = statement.selection(request.sql)
        if query is None:
            return b""
        text = f"DESCRIBE (\n{query.decode(errors='surrogateescape')}\n)"
        lines = handle.query(text, "JSONCompactEachRow", params=dict(request.parameters)).bytes()
        return empty_block([tuple(json.loads(line)[:2]) for line in lines.splitlines()])

    def _settings(self, wanted: Mapping[str, str]) -> str:
        settings = {
            "max_result_bytes": str(self._limits.result_bytes),
            "max_memory_usage": str(self._limits.memory_bytes),
            "max_execution_time": str(self._limits.query_s),
        } | dict(wanted)
        for name in settings:
            if not _SETTING.fullmatch(name):
                text = f"Code: {BAD_ARGUMENTS}. DB::Exception: {name!r} is no name of a setting"
                raise EngineError(text, BAD_ARGUMENTS)
        return ", ".join(f"{name} = {quoted_text(value)}" for name, value in settings.items())


def summary_header(summary: Mapping[str, str]) -> str:
    """Value of X-ClickHouse-Summary."""
    return json.dumps(dict(summary))


def _engine_error(text: str) -> EngineError:
    start = max(text.find("Code: "), 0)
    match = _CODE.search(text)
    return EngineError(text[start:].strip(), int(match[1]) if match else UNKNOWN_EXCEPTION)


def _summary(result: Any) -> dict[str, str]:
    return {
        "read_rows": str(result.rows_read()),
        "read_bytes": str(result.bytes_read()),
        "written_rows": str(result.rows_written()),
        "written_bytes": str(result.bytes_written()),
        "result_bytes": str(len(result)),
        "elapsed_ns": str(int(result.elapsed() * 1e9)),
    }
