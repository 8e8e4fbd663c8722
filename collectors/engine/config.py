"""Settings of the engine source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How often and how patiently an engine's metrics page is read."""

    interval_s: Annotated[float, Ge(1)] = 1.0
    """Time between the starts of two scrapes; rendering the page costs the server time."""
    timeout_s: Annotated[float, Gt(0)] = 2.0
    """Total deadline of a scrape, from connecting to the last byte."""
    path: str = ""
    """Path of the page, added to the path of the engine's base URL; unless set, ``/metrics`` and
    then the other places known."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Engine's base URL → URL of its metrics page, for those that have it on another port."""
    stale_s: Annotated[float, Gt(0)] = 5.0
    """How long an engine may move nothing on its page, while requests are open, before the page is
    called stale; more than its longest step takes."""
    max_series: Annotated[int, Ge(1)] = 10_000
    """Most series kept of a page; of more, those of the name that has the most are given up."""
    token_env: str = ""
    """Environment variable with the bearer token that the page asks for; empty for none."""
    token_file: str = ""
    """File with that token, read anew for each scrape; empty for none."""
    ssl_ca: str = ""
    """PEM file of the authority that signed the page's certificate; empty uses the system's."""
