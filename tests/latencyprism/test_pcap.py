import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from latencyprism.cli import app
from latencyprism.pcap import exchanges_of, remarks

DATA = Path(__file__).parents[1] / "collectors/network/data"
WHOLE = DATA / "openai_stream.pcap.gz"


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "stream.pcap"
    path.write_bytes(gzip.decompress(WHOLE.read_bytes()))
    return path


def test_a_json_object_a_line_for_each_exchange(capture: Path) -> None:
    done = CliRunner().invoke(app, ["pcap", str(capture), "--json"])

    (line,) = done.stdout.splitlines()
    assert list(json.loads(line).items())[:11] == [
        ("method", "POST"),
        ("path", "/v1/chat/completions"),
        ("status", 200),
        ("streaming", True),
        ("chunks", 512),
        ("prompt_tokens", None),
        ("completion_tokens", None),
        ("ttft_ms", 31.189),
        ("e2e_ms", 2349.412),
        ("itl_p50_ms", 4.543),
        ("estimated", []),
    ]


def test_a_table_and_what_was_seen_beside(capture: Path) -> None:
    done = CliRunner().invoke(app, ["pcap", str(capture)])

    assert done.exit_code == 0
    for text in ("POST /v1/chat/completions", "127.0.0.1:8000", "512", "31.19"):
        assert text in done.stdout


def test_only_the_ports_asked_for(capture: Path) -> None:
    assert len(exchanges_of(capture, ports=[8000]).exchanges) == 1
    assert exchanges_of(capture, ports=[80]).exchanges == []


def test_what_is_open_at_the_end_is_told(capture: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture.write_bytes(capture.read_bytes()[:100_000])

    (exchange,) = exchanges_of(capture).exchanges

    assert (exchange["state"], exchange["e2e_ms"], exchange["ttft_ms"]) == ("open", None, 31.189)
    assert 200 < exchange["chunks"] < 300
    assert "cut short" in caplog.text


def test_every_path_and_every_refusal(tmp_path: Path) -> None:
    found = exchanges_of(DATA / "vllm_endpoints.pcap")

    assert [(e["path"], e["status"]) for e in found.exchanges[-2:]] == [
        ("/inference/v1/generate", 403),
        ("/v1/chat/completions", 400),
    ]
    assert remarks(found) == ""
    (tmp_path / "text").write_text("no packets")
    with pytest.raises(ValueError, match="byte 0"):
        exchanges_of(tmp_path / "text")
