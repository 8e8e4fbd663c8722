"""Settings come from file, environment and flags, and a wrong value names its key."""

import stat
from pathlib import Path

import pytest

from latencyprism.settings import SettingsError, dump, load, write


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("LATENCYPRISM_")]:
        monkeypatch.delenv(name)


def test_flags_beat_the_environment_which_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prism.toml"
    file.write_text('[kafka]\nbootstrap = "file:1"\nprefix = "file"\npartitions = 2\n')
    monkeypatch.setenv("LATENCYPRISM_KAFKA__PREFIX", "environment")
    monkeypatch.setenv("LATENCYPRISM_KAFKA__PARTITIONS", "3")

    kafka = load(file, ["kafka.partitions=4"]).kafka

    assert (kafka.bootstrap, kafka.prefix, kafka.partitions) == ("file:1", "environment", 4)


def test_lists_and_tables_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENCYPRISM_COLLECTORS__ENGINES", '["http://127.0.0.1:8000"]')

    settings = load(overrides=['streams.services={"127.0.0.1:8000": "chat"}'])

    assert settings.collectors.engines == ("http://127.0.0.1:8000",)
    assert settings.streams.services == {"127.0.0.1:8000": "chat"}


def test_a_part_keeps_what_another_layer_did_not_set(tmp_path: Path) -> None:
    file = tmp_path / "prism.json"
    file.write_text('{"collectors": {"publish": {"linger_ms": 20}}}')

    publish = load(file, ["collectors.publish.pack_samples=9"]).collectors.publish

    assert (publish.linger_ms, publish.pack_samples) == (20, 9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "kafka.security_protocol=TLS",
            r"kafka\.security_protocol: 'TLS' is not 'PLAINTEXT', 'SSL'",
        ),
        ("kafka.partitions=0", r"kafka\.partitions: '0' is not greater than or equal to 1"),
        ("kafka.bootstrp=x", r"kafka\.bootstrp: there is no such setting \(from --set\)"),
        ("streams.window_ms=fast", r"streams\.window_ms: 'fast' is not a valid integer"),
        ("nonsense", r"--set nonsense: give it as key=value"),
    ],
)
def test_a_wrong_flag_names_key_and_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(overrides=[override])


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENCYPRISM_KAFKA__REPLICATION", "none")

    with pytest.raises(SettingsError, match="from environment LATENCYPRISM_KAFKA__REPLICATION"):
        load()


def test_an_unknown_part_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENCYPRISM_KAFAK__PREFIX", "x")

    with pytest.raises(SettingsError, match="LATENCYPRISM_KAFAK__PREFIX: no part 'kafak'"):
        load()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[kafka", "settings file .*a.toml"),
        ("a.json", "{", "settings file .*a.json"),
        ("a.toml", "a = " + "[" * 5000, "settings file .*a.toml"),
        ("a.json", "[" * 200_000, "settings file .*a.json"),
        ("a.yaml", "", "ends in neither .toml nor .json"),
        ("missing.toml", None, "there is no such file"),
        (
            "a.toml",
            "[kafka]\npartitions = 0",
            r"kafka.partitions: 0 is not .* \(from settings file\)",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)

    with pytest.raises(SettingsError, match=message):
        load(file)


def test_written_settings_are_private_and_read_back(tmp_path: Path) -> None:
    settings = load(overrides=["kafka.sasl_password=secret", f"data_dir={tmp_path}"])

    path = write(settings, tmp_path / "run")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert dump(load(path), secrets=True) == dump(settings, secrets=True)


def test_secrets_are_hidden_on_request() -> None:
    settings = load(overrides=["kafka.sasl_password=hunter2", "store.password=hunter3"])

    assert "hunter" not in dump(settings, secrets=False)
    assert "hunter" not in repr(settings)


def test_a_secret_of_the_wrong_type_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "prism.toml"
    file.write_text("[kafka]\nsasl_password = 20262027\n")

    with pytest.raises(SettingsError, match=r"kafka\.sasl_password: .* valid string") as refused:
        load(file)

    assert "20262027" not in str(refused.value)
