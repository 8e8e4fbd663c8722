"""Settings of the engine source."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How often and how patiently an engine's metrics page is read."""

    interval_s: Annotated[float, Ge(1)] = 1.0
    """Time between the starts of two scrapes; rendering the page costs the server time."""
    timeout_s: Annotated[float, Gt(0)] = 2.0
    """Total deadline of a scrape, from connecting to the last byte."""
    path: str = "/metrics"
    """Path of the page, added to the path of the engine's base URL."""
