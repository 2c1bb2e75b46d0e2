"""The table of settings: parsing, names that do not exist, what must agree, its page in the docs."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from multiring import env

SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_defaults_without_environment() -> None:
    assert env.read(env.Settings, {}) == env.Settings()
    assert env.read(env.Launch, {}) == env.Launch()


def test_environment_is_parsed() -> None:
    settings = env.read(
        env.Settings,
        {"MULTIRING_PORTS": "29400-29402", "MULTIRING_TIMEOUT": "2.5", "MULTIRING_ARENA_BYTES": "1.5MB"},
    )
    assert settings.ports == range(29400, 29403)
    assert settings.timeout == 2.5
    assert settings.arena_bytes == 3 << 19
    launch = env.read(env.Launch, {"MULTIRING_RANK": "3", "MULTIRING_STORE": "a:29400,[fd00::2]:1"})
    assert launch.rank == 3
    assert [env.split_address(a) for a in launch.store] == [("a", 29400), ("fd00::2", 1)]


def test_options_win_over_the_environment() -> None:
    environ = {"MULTIRING_STREAMS": "2", "MULTIRING_TIMEOUT": "5"}
    settings = env.read(env.Settings, environ, streams=4, timeout=None, ports="29400")
    assert (settings.streams, settings.timeout, settings.ports) == (4, 5.0, range(29400, 29401))


@pytest.mark.parametrize(("name", "value"), [("timeout", -5), ("timeout", True), ("streams", 0), ("arena_bytes", -1)])
def test_options_are_held_to_the_same_values_as_text(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: expected "):
        env.read(env.Settings, {}, **{name: value})


def test_options_of_their_own_types() -> None:
    settings = env.read(env.Settings, {}, ports=range(29400, 29403), arena_bytes=1 << 20, topology=SETTINGS)
    assert (settings.ports, settings.arena_bytes, settings.topology) == (range(29400, 29403), 1 << 20, str(SETTINGS))
    assert env.read(env.Settings, {}, ports=29400).ports == range(29400, 29401)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MULTIRING_PORTS", "70000"),
        ("MULTIRING_PORTS", "30-20"),
        ("MULTIRING_PORTS", "http"),
        ("MULTIRING_STREAMS", "0"),
        ("MULTIRING_TIMEOUT", "-1"),
        ("MULTIRING_TIMEOUT", "inf"),
        ("MULTIRING_TIMEOUT", "nan"),
        ("MULTIRING_TIMEOUT", "1e300"),
        ("MULTIRING_TIMEOUT", "1_0"),
        ("MULTIRING_TIMEOUT", "."),
        ("MULTIRING_TIMEOUT", "\u0663"),
        ("MULTIRING_HEARTBEAT_TIMEOUT", "0.5"),
        ("MULTIRING_HEARTBEAT_TIMEOUT", "nan"),
        ("MULTIRING_STREAMS", "1-2"),
        ("MULTIRING_STREAMS", "\u0663"),
        ("MULTIRING_STREAMS", "1025"),
        ("MULTIRING_STREAMS", f"{10**30}"),
        ("MULTIRING_STREAMS", "9" * 5000),
        ("MULTIRING_DEVICE_THREADS", f"{10**30}"),
        ("MULTIRING_PORTS", "\u0663"),
        ("MULTIRING_PORTS", "9" * 5000),
        ("MULTIRING_ARENA_BYTES", "1-2"),
        ("MULTIRING_ARENA_BYTES", "\u0663"),
        ("MULTIRING_ARENA_BYTES", "9" * 5000),
        ("MULTIRING_ARENA_BYTES", "1TB"),
        ("MULTIRING_ARENA_BYTES", "9999999999999999999999"),
        ("MULTIRING_WIRE", "bfloat16"),
        ("MULTIRING_WIRE", "rack="),
        ("MULTIRING_PLAN", "8397EA8D6E4E"),
        ("MULTIRING_PLAN", "4x8x8"),
        ("MULTIRING_PLAN", "multiring:"),
    ],
)
def test_bad_value_names_variable_value_and_form(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}': expected "):
        env.read(env.Settings, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("MULTIRING_RANK", "-1", "0 to 524287"),
        ("MULTIRING_RANK", "0-1", "0 to 524287"),
        ("MULTIRING_WORLD_SIZE", "0", "1 to 524288"),
        ("MULTIRING_WORLD_SIZE", "\u0663", "1 to 524288"),
        ("MULTIRING_LOCAL_WORLD_SIZE", f"{10**30}", "1 to 524288"),
        ("MULTIRING_SECRET_FD", f"{1 << 31}", r"0 to 2\*\*31 - 1"),
        ("MULTIRING_RESTART", f"{1 << 32}", r"0 to 2\*\*32 - 1"),
        ("MULTIRING_REPLACEMENT", "1.5", r"0 to 2\*\*32 - 1"),
    ],
)
def test_what_a_launcher_sets_has_bounds(name: str, value: str, bounds: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}': expected a whole number from {bounds}$"):
        env.read(env.Launch, {name: value})


@pytest.mark.parametrize("name", ["streams", "timeout", "arena_bytes", "tune", "device_threads", "socket_threads"])
def test_a_range_is_for_ports_alone(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=range\(1, 3\): expected "):
        env.read(env.Settings, {}, **{name: range(1, 3)})


@pytest.mark.parametrize("ports", [range(5, 1), range(0, 9), range(65530, 65540)])
def test_a_range_of_ports_is_held_to_what_ports_are(ports: range) -> None:
    with pytest.raises(ValueError, match="expected a port or a range within 1-65535"):
        env.read(env.Settings, {}, ports=ports)


def test_a_number_of_numpy_is_that_of_python() -> None:
    assert [env.whole_number("n", value) for value in (np.uint8(255), np.int64(-3), 7)] == [255, -3, 7]
    assert type(env.whole_number("n", np.uint8(255))) is int
    for value in (True, np.bool_(True), 2.0, np.float32(2), "2", None):
        with pytest.raises(TypeError, match=rf"n={re.escape(repr(value))}: expected a whole number"):
            env.whole_number("n", value)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="unknown option 'tiemout'; options are engine, host, interface"):
        env.read(env.Settings, {}, tiemout=3)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 3 << 30])
def test_plain_numbers_are_bytes(size: int) -> None:
    assert env.parse_size(str(size)) == size


@pytest.mark.parametrize("address", ["a:1", "[fd00::2]:29400", "10.0.0.1:65535"])
def test_addresses_survive_splitting(address: str) -> None:
    assert env.join_address(*env.split_address(address)) == address


def test_a_wire_is_given_as_text_or_by_level() -> None:
    given = env.read(env.Settings, {"MULTIRING_WIRE": "rack=float16, host=float16"})
    assert given == env.read(env.Settings, {}, wire={"rack": "float16", "host": "float16"})
    assert env.agreed(given)["MULTIRING_WIRE"] == "host=float16,rack=float16"
    assert env.parse_wire(given.wire) == {"host": "float16", "rack": "float16"}
    assert env.parse_wire(env.read(env.Settings, {}, wire={"site": "int8"}).wire) == {"site": "int8"}
    assert env.parse_wire(env.read(env.Settings, {}, wire="auto").wire) == "auto"
    assert env.parse_wire(env.Settings().wire) == ""
    with pytest.raises(ValueError, match="each level once"):
        env.parse_wire("rack=float16,rack=bfloat16")


def test_unknown_name_warns_once_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"MULTIRING_TIEMOUT": "3", "MULTIRING_TIMEOUT": "3", "PATH": ""}
    with caplog.at_level(logging.WARNING, "multiring"):
        env.warn_unknown(environ)
        env.warn_unknown(environ)
    assert [record.getMessage() for record in caplog.records] == [
        "unknown environment variable MULTIRING_TIEMOUT is ignored; did you mean MULTIRING_TIMEOUT?"
    ]


def test_kubernetes_service_variables_are_no_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    injected = [
        "MULTIRING_PORT",
        "MULTIRING_SERVICE_HOST",
        "MULTIRING_SERVICE_PORT",
        "MULTIRING_SERVICE_PORT_HTTP",
        "MULTIRING_PORT_29400_TCP",
        "MULTIRING_PORT_29400_TCP_ADDR",
        "MULTIRING_WORKERS_SERVICE_HOST",
        "MULTIRING_WORKERS_PORT_80_TCP_PROTO",
    ]
    with caplog.at_level(logging.WARNING, "multiring"):
        env.warn_unknown(dict.fromkeys(injected, "tcp://10.0.0.1:80"))
    assert not caplog.records
    assert not env.NAMES & set(injected)


def test_what_must_agree() -> None:
    agreed = env.agreed(env.Settings(streams=3), env.Launch(restart=2))
    assert agreed["MULTIRING_STREAMS"] == "3"
    assert agreed["MULTIRING_RESTART"] == "2"
    assert "MULTIRING_HOST" not in agreed


@pytest.mark.parametrize("table", [env.Settings, env.Launch])
def test_the_docs_hold_the_table(table: type) -> None:
    assert env.markdown(table) in SETTINGS.read_text()


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_an_address_has_a_port_that_exists(port: int) -> None:
    with pytest.raises(ValueError, match=rf"MULTIRING_STORE='localhost:{port}': expected .* a port being 1 to 65535"):
        env.read(env.Launch, {"MULTIRING_STORE": f"localhost:{port}"})
