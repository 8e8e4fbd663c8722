"""``latencyprism replay``: a recording through the live pipe, on its own clock."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from latencyprism.recordings.format import Recording
from latencyprism.recordings.imports import import_trace
from latencyprism.recordings.replay import replay, replay_config
from latencyprism.settings import Settings
from latencyprism.stack import running_stack

TRACE_FILE = "requests.jsonl.gz"
"""What tells a trace of the lab's layout from a recording."""


def run_replay(
    settings: Settings,
    target: Path,
    *,
    report: Path,
    warm: Sequence[Path],
    speed: float | None,
    console: Console,
) -> None:
    """Replay the recording after the warm ones and write the report.

    A folder of the lab's trace layout is imported on the way. On a given Kafka cluster the topics
    get a prefix of their own, so that nothing mixes with live telemetry. History goes to the
    ``replay`` folder of ``data_dir``. Raises ReplayError when the workers make no progress.
    """
    with ExitStack() as stack:
        recordings = [stack.enter_context(opened(path, console)) for path in (target, *warm)]
        pipe = stack.enter_context(
            running_stack(_replay_settings(settings), workers=1, say=console.print)
        )
        stack.enter_context(console.status(f"replaying {target}"))
        result = replay(
            recordings[0],
            pipe.settings.kafka,
            warm=recordings[1:],
            config=pipe.settings.streams,
            speed=speed,
        )
    report.write_text(json.dumps(result, indent=1))
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in result["batches"].items())
    console.print(f"{report}: {len(result['alerts'])} alerts; windows: {verdicts}")
    if not settings.store.url:
        folder = _replay_settings(settings).data_dir
        console.print(
            f"History: latencyprism --set data_dir={folder} sql", markup=False, soft_wrap=True
        )


@contextmanager
def opened(folder: Path, console: Console) -> Iterator[Recording]:
    """The recording in a folder; a trace of the lab's layout is imported for the moment."""
    if not (folder / TRACE_FILE).exists():
        yield Recording(folder)
        return
    with tempfile.TemporaryDirectory(prefix="latencyprism-") as temporary:
        out = Path(temporary) / folder.name
        with console.status(f"importing {folder}"):
            import_trace(folder, out)
        yield Recording(out)


def _replay_settings(settings: Settings) -> Settings:
    prefix = settings.kafka.group(f"replay-{uuid4().hex[:8]}")
    return settings.model_copy(
        update={
            "data_dir": settings.data_dir / "replay",
            "kafka": replace(settings.kafka, prefix=prefix, partitions=1),
            "streams": replay_config(settings.streams),
        }
    )
