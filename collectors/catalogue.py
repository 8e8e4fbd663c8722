"""Which sources a configuration asks for, and how each is made."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from latencyprism.collectors.address import instance_of
from latencyprism.collectors.config import CollectorConfig, SourceName
from latencyprism.collectors.engine.scraper import EngineSource
from latencyprism.collectors.host.source import HostSource
from latencyprism.collectors.source import Source, UnavailableError

Builder = Callable[[CollectorConfig], Sequence[Source]]
"""Makes the sources of one kind. Raises :class:`UnavailableError` where the machine does not
permit them, ImportError where a library is missing, ValueError naming a setting that is wrong."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Sources to run: equal plans make equal sources, so those go on over a change of settings."""

    name: str
    """As the source's own, before there is one."""
    inputs: tuple[object, ...]
    """All of the settings that its sources depend on."""
    builder: Builder
    config: CollectorConfig

    def same_as(self, other: "Planned") -> bool:
        """Whether both would make the same sources."""
        return (self.name, self.inputs) == (other.name, other.inputs)

    def make(self) -> Sequence[Source]:
        """The sources. Raises :class:`UnavailableError` saying why not and what to do, ValueError
        naming a setting that is wrong.
        """
        try:
            return self.builder(self.config)
        except ImportError as error:
            extra = EXTRAS.get(self.name, "collectors")
            raise UnavailableError(f"{error}; install the extra latencyprism[{extra}]") from error


def plan(
    config: CollectorConfig, *, builders: Mapping[SourceName, Builder] | None = None
) -> list[Planned]:
    """The enabled sources, one entry for each engine and one for each other kind.

    ``builders`` are :data:`BUILDERS` unless given. Raises ValueError naming an engine's URL that
    is wrong.
    """
    builders = BUILDERS if builders is None else builders
    engines = tuple(dict.fromkeys(config.engines))
    planned = []
    for kind in dict.fromkeys(config.sources):
        if kind == "engine":  # a source each, so that a hung engine holds up no other
            planned += [
                Planned(
                    f"{kind} {instance_of(url)}",
                    (url, config.engine),
                    builders[kind],
                    replace(config, engines=(url,)),
                )
                for url in engines
            ]
        else:
            inputs = (engines, getattr(config, kind))
            planned.append(Planned(kind, inputs, builders[kind], replace(config, engines=engines)))
    return planned


def _engine_sources(config: CollectorConfig) -> Sequence[Source]:
    return [EngineSource(url, config.engine) for url in config.engines]


def _host_source(config: CollectorConfig) -> Sequence[Source]:
    return [HostSource(config.engines, config.host)]


def _network_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.network.source import NetworkSource

    if not may_capture():
        raise UnavailableError(
            "capturing packets needs CAP_NET_RAW; run as root, or give the capability to the "
            "service (AmbientCapabilities=CAP_NET_RAW, or setcap cap_net_raw+ep on the interpreter)"
        )
    return [NetworkSource(config.engines, config.network)] if config.engines else []


def _xpu_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.xpu import source

    refusal = source.unavailable(config.xpu)
    if refusal is not None:
        raise refusal
    return [source.XpuSource(config.engines, config.xpu)]


def _gateway_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.gateway.source import GatewaySource

    return [GatewaySource(config.engines, config.gateway)]


def _otlp_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.otlp.source import OtlpSource

    return [OtlpSource(config.engines, config.otlp)]


def _kernel_source(config: CollectorConfig) -> Sequence[Source]:
    from latencyprism.collectors.kernel import source

    reason = source.unavailable(config.kernel)
    if reason is not None:
        raise UnavailableError(reason)
    return [source.KernelSource(config.engines, config.kernel)] if config.engines else []


BUILDERS: dict[SourceName, Builder] = {
    "engine": _engine_sources,
    "host": _host_source,
    "network": _network_source,
    "xpu": _xpu_source,
    "gateway": _gateway_source,
    "otlp": _otlp_source,
    "kernel": _kernel_source,
}
"""How each kind is made; the agent adds ``stacks``, which needs Kafka."""
EXTRAS: Mapping[str, str] = {"stacks": "stacks", "otlp": "otlp"}
"""Kind of source → the extra that brings its libraries, where that is not ``collectors``."""


def may_capture() -> bool:
    """Whether this process may open a packet socket."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except OSError:
        return False
    return True
