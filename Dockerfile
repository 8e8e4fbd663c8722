# The image of every role of docker-compose.yml: latencyprism topics, collect, worker, sink, router.
# Not built where it was written (no Docker engine there); tests/test_compose.py checks what can be read.

FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN python -m venv /opt/latencyprism \
    && /opt/latencyprism/bin/pip install --no-cache-dir \
        ".[collectors,streams,sinks,routers,registry]"

FROM python:3.11-slim-bookworm
RUN groupadd --system --gid 10001 latencyprism \
    && useradd --system --uid 10001 --gid latencyprism --home-dir /var/lib/latencyprism \
        --create-home --shell /usr/sbin/nologin latencyprism
COPY --from=build /opt/latencyprism /opt/latencyprism
ENV PATH=/opt/latencyprism/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    LATENCYPRISM_DATA_DIR=/var/lib/latencyprism
USER latencyprism
VOLUME /var/lib/latencyprism
ENTRYPOINT ["latencyprism"]
CMD ["--help"]
