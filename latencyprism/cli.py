"""The command line: each command reads settings, calls one function, and prints."""

import json
import logging
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from confluent_kafka import KafkaException
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from latencyprism import __version__
from latencyprism.children import die_with_parent
from latencyprism.collectors.config import CollectorConfig
from latencyprism.rows import rows_of
from latencyprism.schemas.codec import registry_for
from latencyprism.schemas.connection import KafkaConfig
from latencyprism.settings import Settings, dump, load

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Watches LLM inference from outside and tells workload from fault.",
)
dlq = typer.Typer(no_args_is_help=True, help="Look into the dead letters.")
app.add_typer(dlq, name="dlq")
console = Console()
logger = logging.getLogger(__name__)

Ready = Annotated[Path | None, typer.Option(hidden=True, help="File written when the role is up.")]
Parent = Annotated[int | None, typer.Option(hidden=True, help="Process to end with.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Run the command line; what a person can mend is said in words, with exit code 2.

    The parts' errors derive from these classes and say what to do; -v adds the traceback.
    """
    try:
        app()
    except KafkaException as e:
        logger.info("traceback", exc_info=True)
        fail(f"Kafka: {e.args[0].str() if e.args else e}")
    except (OSError, ValueError, RuntimeError, LookupError) as e:
        logger.info("traceback", exc_info=True)
        fail(str(e) or type(e).__name__)


def fail(text: str) -> NoReturn:
    """Say what went wrong and end with exit code 2."""
    Console(stderr=True).print(text, style="red", markup=False, highlight=False)
    raise SystemExit(2)


def tell_version(asked: bool) -> None:
    """Print the version and exit, if asked."""
    if asked:
        typer.echo(f"latencyprism {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Settings file, .toml or .json [LATENCYPRISM_CONFIG].")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as key=value; repeatable.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at level INFO.")] = False,
    version: Annotated[  # noqa: ARG001 - acts when it is read
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    """Read the options that every command has."""
    level = logging.INFO if verbose else logging.WARNING
    handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False)
    if not sys.stderr.isatty():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    context.obj = load(config, override or ())


# ---------------------------------------------------------------------- what a person does


@app.command()
def demo(
    context: typer.Context,
    report: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Run the main job on two simulated replicas, with a burst and a fault, and tell the story.

    Exit code 1 when the fault was missed or the burst was called a fault.
    """
    from latencyprism.demo import run_demo

    raise SystemExit(0 if run_demo(context.obj, report=report, console=console) else 1)


@app.command()
def up(
    context: typer.Context,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a server to watch; repeatable. Those found on this host if none."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=16)] = 1,
    duration: Annotated[
        float | None, typer.Option(help="Seconds; until Ctrl-C if not given.")
    ] = None,
) -> None:
    """Watch real servers until stopped."""
    from latencyprism.up import up as run

    settings: Settings = context.obj
    engines = tuple(engine or ())
    looking = settings.collectors.discovery.enabled != "off"
    if not engines and not settings.collectors.engines and not looking:
        fail("name at least one server: latencyprism up --engine http://127.0.0.1:8000")
    run(settings, engines, workers=workers, duration_s=duration, console=console)


@app.command()
def replay(
    context: typer.Context,
    recording: Path,
    report: Annotated[Path, typer.Option(help="Where the report goes (JSON).")],
    warm: Annotated[
        list[Path] | None, typer.Option(help="Recording to learn from first; repeatable.")
    ] = None,
    speed: Annotated[str, typer.Option(help="max, or a factor of real time.")] = "max",
) -> None:
    """Feed a recording through the same pipe (Kafka, Faust, store) on its own clock."""
    from latencyprism.replay import run_replay

    factor = None if speed == "max" else float(speed)
    run_replay(
        context.obj, recording, report=report, warm=warm or [], speed=factor, console=console
    )


@app.command()
def record(
    context: typer.Context,
    out: Path,
    duration: Annotated[float, typer.Option(help="Seconds.")] = 60.0,
) -> None:
    """Record the telemetry of a running system."""
    from latencyprism.recordings.capture import record as run

    settings: Settings = context.obj
    if not settings.kafka.bootstrap:
        fail("record reads a running system: give --set kafka.bootstrap=host:port")
    counts = run(settings.kafka, out, duration_s=duration)
    console.print(f"{out}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))


@app.command(name="import")
def import_(folder: Path, out: Path) -> None:
    """Turn a labelled trace of the lab's layout into a recording."""
    from latencyprism.recordings.imports import import_trace

    with console.status(f"importing {folder}"):
        counts = import_trace(folder, out)
    console.print(f"{out}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))


@app.command()
def pcap(
    file: Annotated[Path, typer.Argument(help="Capture file: pcap or pcapng.")],
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="Port of a server; repeatable. All if not given."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line for each exchange.")
    ] = False,
) -> None:
    """Time the HTTP exchanges in recorded packets: TTFT, inter-token gaps, tokens, status."""
    from latencyprism.pcap import exchanges_of, remarks, rendered

    found = exchanges_of(file, ports=port or ())
    if as_json:
        for exchange in found.exchanges:
            typer.echo(json.dumps(exchange))
        return
    console.print(rendered(found, width=console.width))
    if found.counts:
        console.print(f"Seen beside: {remarks(found)}", style="yellow", markup=False)


@app.command()
def score(recording: Path, report: Path, as_json: Json = False) -> None:
    """Score a report of a replay against the recording's labels."""
    from latencyprism.recordings.score import render, score_files

    result = score_files(recording, report)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        console.print(render(result))


@app.command()
def sql(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Query to run; lists them if missing.")] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", help="key=value; repeatable.")
    ] = None,
    show: Annotated[bool, typer.Option(help="Print the query instead of running it.")] = False,
    as_json: Json = False,
) -> None:
    """List or run the shipped investigation queries."""
    from latencyprism.sinks import queries

    if name is None:
        table = Table("query", "answers")
        for query in queries.available():
            table.add_row(query.name, query.question)
        console.print(table)
        console.print("`sql NAME` runs one, `sql NAME --show` prints it with its parameters.")
        return
    query = queries.get(name)
    if show:
        typer.echo(query.sql)
        return
    values = dict(_pair(text) for text in param or ())
    from latencyprism.storage import open_store

    with open_store(context.obj) as client:
        answer = queries.run(client, query, values)
    if as_json:
        rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
        typer.echo(json.dumps(rows, default=str))
        return
    console.print(query.question, style="bold")
    console.print(rows_of(answer.columns, answer.rows, width=console.width))


@app.command()
def migrate(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option(help="Say what would be done.")] = False,
    force: Annotated[bool, typer.Option(help="Allow steps that remove data.")] = False,
) -> None:
    """Bring the store's tables up to date and show the state of every migration."""
    from latencyprism.sinks.migrations.migrate import apply, status
    from latencyprism.storage import open_store

    with open_store(context.obj, migrated=False) as client:
        if not dry_run:
            apply(client, context.obj.store, force=force)
        table = Table("migration", "state")
        for migration in status(client, context.obj.store):
            table.add_row(migration.name, migration.state)
    console.print(table)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what this host allows, what signal is lost without it, and what to do."""
    from latencyprism.collectors.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([vars_of(finding) for finding in findings]))
        return
    table = Table.grid(padding=(0, 2))
    colours = {"yes": "green", "partly": "yellow", "no": "red"}
    for f in findings:
        table.add_row(Text(f.state, colours[f.state]), f.name, Text(f.seen))
        if f.state != "yes":
            table.add_row("", "", Text.assemble(("without it: ", "dim"), f.lost))
            table.add_row("", "", Text.assemble(("what to do: ", "dim"), f.advice))
    console.print(table)


@app.command()
def stacks(
    context: typer.Context,
    engine: Annotated[
        str | None, typer.Option(help="URL of a server on this machine, all its processes.")
    ] = None,
    pid: Annotated[int | None, typer.Option(help="One process instead.")] = None,
    duration: Annotated[int, typer.Option(min=1, max=60, help="Seconds.")] = 5,
    as_json: Json = False,
) -> None:
    """Sample the call stacks of a Python server and fold them into stages (needs py-spy).

    Without stopping the server; as its own user, as root or with CAP_SYS_PTRACE.
    """
    from latencyprism.stacks import profiles, render

    settings: Settings = context.obj
    config = replace(settings.collectors.stacks, duration_s=duration)
    with console.status(f"taking stacks for {duration} s"):
        taken = profiles(engine=engine, pid=pid, config=config)
    if as_json:
        typer.echo(json.dumps([asdict(profile) for profile in taken]))
    else:
        console.print(render(taken))


@app.command()
def topics(
    context: typer.Context,
    create: Annotated[bool, typer.Option(help="Make the missing ones.")] = False,
) -> None:
    """Show the topics: contract, partitions, messages, lag of the readers."""
    from latencyprism.topics_admin import describe_topics, ensure_topics

    kafka = _cluster(context.obj, "topics")
    if create:
        done = ensure_topics(kafka, timeout_s=30.0)
        console.print(f"created {len(done.created)}, already there {len(done.existing)}")
        for finding in done.findings:
            console.print(finding, style="yellow")
        return
    columns = ("topic", "record", "key", "partitions", "messages", "lag")
    rows = [
        (t.name, t.record, t.key, t.partitions, t.messages, [f"{g} {n}" for g, n in t.lag.items()])
        for t in describe_topics(kafka, timeout_s=30.0)
    ]
    console.print(rows_of(columns, rows, width=console.width))


@dlq.command(name="list")
def dlq_list(context: typer.Context, limit: int = 50) -> None:
    """List the newest dead letters and count them by reason."""
    from latencyprism.deadletters import read, table

    console.print(table(read(_cluster(context.obj, "dlq list"), limit=limit)))


@dlq.command(name="show")
def dlq_show(context: typer.Context, offset: int) -> None:
    """Show one dead letter: where it came from, why it was refused, and its bytes."""
    from latencyprism.deadletters import detail, read_one

    console.print(detail(read_one(_cluster(context.obj, "dlq show"), offset)))


@dlq.command(name="requeue")
def dlq_requeue(context: typer.Context, offset: int) -> None:
    """Put one dead letter back on the topic it came from."""
    from latencyprism.deadletters import requeue

    console.print(requeue(_cluster(context.obj, "dlq requeue"), offset))


@app.command(name="settings")
def show_settings(context: typer.Context) -> None:
    """Print the settings in force as JSON, secrets hidden."""
    typer.echo(dump(context.obj, secrets=False))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="collect, detect or sink")],
    recording: Annotated[
        list[Path] | None, typer.Option(help="For detect: labelled recordings; repeatable.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="For collect: URL of a live server; a simulated one without."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the figures of one bench and print them beside their bars."""
    from latencyprism.bench.run import run_bench

    result = run_bench(name, recordings=recording or [], engine=engine)
    typer.echo(json.dumps(result.as_json())) if as_json else console.print(result.table())


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# ---------------------------------------------------------------------- roles of a deployment


@app.command()
def collect(
    context: typer.Context,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="URL of a server to watch; repeatable. Looks for servers without."),
    ] = None,
    ready: Ready = None,
    parent: Parent = None,
) -> None:
    """Run the collectors of this host (a role); SIGHUP has the settings read again."""
    from latencyprism.collectors.agent import run_agent

    _role(parent)
    logging.getLogger("latencyprism.collectors").setLevel(logging.INFO)
    options = context.find_root().params

    def collectors(settings: Settings) -> CollectorConfig:
        engines = tuple(engine or settings.collectors.engines)
        return replace(settings.collectors, engines=engines)

    def reread() -> tuple[CollectorConfig, KafkaConfig]:
        settings = load(options["config"], options["override"] or ())
        return collectors(settings), settings.kafka

    settings: Settings = context.obj
    kafka = _cluster(settings, "collect")
    announce = _announce(ready)
    run_agent(
        collectors(settings),
        kafka,
        registry_for(kafka),
        reread=reread,
        observe=lambda _: announce(),
    )


@app.command()
def worker(
    context: typer.Context,
    number: Annotated[int, typer.Option(help="Tells the workers of one host apart.")] = 1,
    ready: Ready = None,
    parent: Parent = None,
) -> None:
    """Run one stream worker (a role)."""
    from latencyprism.streams.worker import run_worker

    _role(parent)
    settings: Settings = context.obj
    datadir = settings.data_dir / f"worker-{number}"
    kafka = _cluster(settings, "worker")
    run_worker(settings.streams, kafka, datadir=datadir, ready=_announce(ready))


@app.command()
def sink(context: typer.Context, ready: Ready = None, parent: Parent = None) -> None:
    """Write all topics to ClickHouse (a role)."""
    from latencyprism.sinks.writer import run_sink

    _role(parent)
    settings: Settings = context.obj
    run_sink(settings.store, _cluster(settings, "sink"), ready=_announce(ready))


@app.command()
def store(
    context: typer.Context, port: int = 0, ready: Ready = None, parent: Parent = None
) -> None:
    """Own the embedded store's folder and serve ClickHouse's HTTP protocol on loopback (a role)."""
    from latencyprism.sinks.store import serve_store
    from latencyprism.storage import store_directory

    _role(parent)
    settings: Settings = context.obj
    serve_store(
        store_directory(settings),
        port=port,
        username=settings.store.username,
        password=settings.store.password,
        ready=_announce(ready),
    )


@app.command()
def router(context: typer.Context, ready: Ready = None, parent: Parent = None) -> None:
    """Obey commands on behalf of a router such as HAProxy (a role)."""
    from latencyprism.routers.consumer import run_router

    _role(parent)
    settings: Settings = context.obj
    run_router(settings.router, _cluster(settings, "router"), ready=_announce(ready))


@app.command()
def proxy(
    context: typer.Context,
    timings: Annotated[
        bool, typer.Option(help="Report request timings, where packets may not be captured.")
    ] = False,
    ready: Ready = None,
    parent: Parent = None,
) -> None:
    """Run the reference proxy in front of the router's targets (a role)."""
    from latencyprism.collectors.publisher import KafkaPublisher
    from latencyprism.routers.proxy import run_proxy

    _role(parent)
    settings: Settings = context.obj
    publisher = None
    if timings:
        publisher = KafkaPublisher(
            agent=settings.router.router,
            boot_ns=time.time_ns(),
            config=settings.collectors.publish,
            kafka=settings.kafka,
            registry=registry_for(settings.kafka),
        )
        publisher.start()
    try:
        run_proxy(settings.router, settings.kafka, emit=publisher, ready=_announce(ready))
    finally:
        if publisher is not None:
            publisher.close(timeout_s=2.0)


def _role(parent: int | None) -> None:
    if parent is not None:
        die_with_parent(parent)


def _announce(ready: Path | None) -> Any:
    """A callable that writes its argument to the ready file in one step, or does nothing."""

    def announce(text: object = "") -> None:
        if ready is not None:
            draft = ready.with_name(ready.name + ".draft")
            draft.write_text(str(text))
            draft.replace(ready)

    return announce


def _cluster(settings: Settings, command: str) -> Any:
    if not settings.kafka.bootstrap:
        fail(
            f"{command} needs a running Kafka: give --set kafka.bootstrap=host:port "
            "(`latencyprism up` prints its own)"
        )
    return settings.kafka


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        fail(f"--param {text}: give it as key=value")
    return key, value


def vars_of(record: Any) -> dict[str, Any]:
    """Fields of a slotted dataclass by name."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
