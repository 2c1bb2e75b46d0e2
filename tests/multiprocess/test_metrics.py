"""Metrics of ranks that are scraped while they run, by the text that Prometheus reads."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jobs
import metrics_ranks
import pytest
from free_ports import free_ports

from multiring import env, metrics
from multiring.net.membership import Membership
from multiring.runtime.comm import Communicator

pytest.importorskip("prometheus_client")

ROOT = Path(__file__).resolve().parents[2]

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("job", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def read(text: str) -> Samples:
    """Values of each metric by labels other than those of the rank, which are under "of"."""
    found: Samples = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        by_name = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault("of", {})[tuple(sorted((key, by_name.pop(key)) for key in ("rank", "host")))] = 1
        found.setdefault(name, {})[tuple(sorted(by_name.items()))] = float(value)
    return found


def scraped(connection: http.client.HTTPConnection) -> Samples:
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200
    text = answer.read().decode()
    connection.close()
    return read(text)


def at(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=30)


def test_two_ranks_are_scraped_while_they_run(tmp_path: Path) -> None:
    first, go = free_ports(2)[0], tmp_path / "go"
    job = jobs.start(metrics_ranks.calls_until, 2, str(go), environment={"MULTIRING_METRICS": str(first)})
    for rank in range(2):
        assert job.line(rank) == "ready"
    found = [scraped(at(first + rank)) for rank in range(2)]
    go.touch()
    outcomes = job.wait()
    for rank, samples in enumerate(found):
        ((labels, _),) = samples["of"].items()
        assert dict(labels)["rank"] == str(rank)
        assert samples["multiring_ranks"] == {(): 2}
        message = "send" if rank == 0 else "recv"
        calls = {"all_reduce": 4, "broadcast": 1, message: 3}
        nbytes = {"all_reduce": 4 * 5000 * 4, "broadcast": 100 * 8, message: 3 * 30 * 8}
        assert samples["multiring_calls_total"] == {(("collective", name),): n for name, n in calls.items()}
        assert samples["multiring_bytes_total"] == {(("collective", name),): n for name, n in nbytes.items()}
        assert set(samples["multiring_call_seconds_total"]) == set(samples["multiring_calls_total"])
        assert samples["multiring_waited_for_seconds_total"].keys() == {(("peer", str(1 - rank)),)}
        assert samples["multiring_link_sent_bytes_total"][("level", "rank"),] > 0
        assert samples["multiring_failed"] == {(): 0}
        counted, imported = outcomes[rank].value
        assert {name: (done["operations"], done["bytes"]) for name, done in counted.items()} == {
            **{name: (calls[name], nbytes[name]) for name in calls},
            "barrier": (1, counted["barrier"]["bytes"]),
        }
        assert imported == ["prometheus_client"]
    for rank in range(2):
        with pytest.raises(ConnectionRefusedError):
            at(first + rank).connect()


def test_nothing_is_imported_where_nobody_asks(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    for _, imported in jobs.run(metrics_ranks.calls_until, 2, str(tmp_path / "go")):
        assert imported == []


def test_a_unix_socket_and_a_directory(tmp_path: Path) -> None:
    go, place, files = tmp_path / "go", tmp_path / "job", tmp_path / "files"
    files.mkdir()
    left = socket.socket(socket.AF_UNIX)
    left.bind(f"{place}.1")  # a rank that was killed left it
    left.close()
    job = jobs.start(metrics_ranks.calls_until, 2, str(go), environment={"MULTIRING_METRICS": f"unix:{place}"})
    other = jobs.start(metrics_ranks.calls_until, 2, str(go), environment={"MULTIRING_METRICS": f"{files}/"})
    for rank in range(2):
        assert (job.line(rank), other.line(rank)) == ("ready", "ready")
    for rank in range(2):
        samples = scraped(UnixConnection(tmp_path / f"job.{rank}"))
        assert (("collective", ("send", "recv")[rank]),) in samples["multiring_calls_total"]
        (labels,) = read((files / f"multiring_{rank}.prom").read_text())["of"]
        assert dict(labels)["rank"] == str(rank)
    go.touch()
    assert [outcome.code for outcome in (*job.wait(), *other.wait())] == [0] * 4
    assert list(files.iterdir()) == []
    assert not list(tmp_path.glob("job.*"))


def test_metrics_outlive_shrink_and_grow(tmp_path: Path) -> None:
    first, back = free_ports(3)[0], tmp_path / "back"
    environment = {"MULTIRING_METRICS": str(first), "MULTIRING_HEARTBEAT_TIMEOUT": "5"}
    job = jobs.start(metrics_ranks.goes_on, 3, "", str(back), environment=environment)
    assert job.processes[1].wait(60) == -signal.SIGKILL
    assert [job.line(rank) for rank in (0, 2)] == ["shrunk"] * 2
    for rank in (0, 2):
        samples = scraped(at(first + rank))
        (labels,) = samples["of"]
        assert dict(labels)["rank"] == str(rank)
        assert "multiring_failure" not in samples
        assert (samples["multiring_ranks"], samples["multiring_generation"]) == ({(): 2}, {(): 1})
        assert (samples["multiring_ranks_lost_total"], samples["multiring_ranks_replaced_total"]) == ({(): 1}, {(): 0})
        assert set(samples["multiring_waited_for_seconds_total"]) == {(("peer", str(2 - rank)),)}
    newcomer = job.replace(1)
    assert [job.line(index) for index in (0, 2, newcomer)] == ["grown"] * 3
    for rank in range(3):
        samples = scraped(at(first + rank))
        (labels,) = samples["of"]
        assert dict(labels)["rank"] == str(rank)
        assert samples["multiring_ranks"] == {(): 3}
        assert samples["multiring_ranks_lost_total"] == {(): float(rank != 1)}
        assert samples["multiring_ranks_replaced_total"] == {(): float(rank != 1)}
    back.touch()
    outcomes = job.wait()
    assert [outcomes[index].value for index in (0, 2, newcomer)] == ["done"] * 3


def test_a_mismatch_is_told_with_the_call_that_each_rank_made(tmp_path: Path) -> None:
    """The calls of all show which rank's is another than most others'."""
    first, go, odd = free_ports(4)[0], tmp_path / "go", 2
    job = jobs.start(metrics_ranks.disagrees, 4, odd, str(go), environment={"MULTIRING_METRICS": str(first)})
    assert [job.line(rank) for rank in range(4)] == ["disagree"] * 4
    told = [scraped(at(first + rank)) for rank in range(4)]
    go.touch()
    named = [outcome.value for outcome in job.wait()]
    assert named[:2] + named[3:] == [str(odd)] * 3
    for rank, samples in enumerate(told):
        assert samples["multiring_failed"] == {(): 1}
        ((labels, value),) = samples["multiring_failure"].items()
        assert (dict(labels)["kind"], dict(labels)["peer"], value) == ("Mismatch", named[rank], 1)
        words = f"all_reduce(dtype=int64, count={6 if rank == odd else 5}, op=sum)"
        assert re.fullmatch(re.escape(words) + r" by plan \w{12}", dict(labels)["call"])


def test_a_port_in_use() -> None:
    first = free_ports(2)[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        environment = {"MULTIRING_METRICS": str(first)}
        said = [outcome.value for outcome in jobs.start(metrics_ranks.cannot_show, 2, environment=environment).wait()]
    line = (
        f"ResourceError: MULTIRING_METRICS={first}: local rank 1 needs port {first + 1} of 127.0.0.1: "
        "Address already in use: name another first port, from which on each rank of a host takes one, or unset it"
    )
    assert said[1] == line
    assert said[0].startswith("PeerLost: rank 1 ")
    assert line in said[0]


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    place = f"{tmp_path}/none/"
    (said,) = jobs.run(metrics_ranks.cannot_show, 1, environment={"MULTIRING_METRICS": place})
    assert said == (
        f"ResourceError: MULTIRING_METRICS={place}: {place}: No such file or directory: name another place, or unset it"
    )


def test_a_directory_in_which_another_job_writes(tmp_path: Path) -> None:
    """A rank holds a file there while it writes; one that was killed leaves it, and holds it no longer."""
    go, files = tmp_path / "go", tmp_path / "files"
    files.mkdir()
    (files / "multiring_0.prom.lock").touch()
    environment = {"MULTIRING_METRICS": f"{files}/"}
    job = jobs.start(metrics_ranks.calls_until, 2, str(go), environment=environment)
    assert [job.line(rank) for rank in range(2)] == ["ready"] * 2
    (said,) = jobs.run(metrics_ranks.cannot_show, 1, environment=environment)
    assert said == (
        f"ResourceError: MULTIRING_METRICS={files}/: {files}/: a rank of another job writes multiring_0.prom there: "
        "name another place, or unset it"
    )
    go.touch()
    assert [outcome.code for outcome in job.wait()] == [0] * 2
    assert list(files.iterdir()) == []
    for _, imported in jobs.run(metrics_ranks.calls_until, 2, str(go), environment=environment):
        assert imported == ["prometheus_client"]


def test_without_the_package() -> None:
    (said,) = jobs.run(metrics_ranks.without_package, 1, environment={"MULTIRING_METRICS": "9400"})
    assert said == (
        "MultiringError: MULTIRING_METRICS=9400 needs prometheus_client, which is not installed: "
        "pip install 'multiring[metrics]', or unset it"
    )


@pytest.mark.parametrize("text", ["metrics", "0", "65536", "host:", "unix:relative", ":9400", "1.2.3.4", "a b:9"])
def test_a_value_that_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match=rf"MULTIRING_METRICS='{re.escape(text)}': expected a port, address:port"):
        env.read(env.Settings, {"MULTIRING_METRICS": text})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9400", ("tcp", "127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("tcp", "0.0.0.0", 9400)),
        ("[::1]:9400", ("tcp", "::1", 9400)),
        ("unix:/run/job", ("unix", "/run/job", 0)),
        ("./files", ("directory", "./files", 0)),
    ],
)
def test_places(text: str, place: tuple[str, str, int]) -> None:
    assert env.parse_metrics(env.read(env.Settings, {"MULTIRING_METRICS": text}).metrics) == place


def test_a_forked_child_does_not_keep_the_port(tmp_path: Path) -> None:
    first, go = free_ports(1)[0], tmp_path / "go"
    jobs.run(metrics_ranks.of_forked_child, 1, str(go), environment={"MULTIRING_METRICS": str(first)})
    with pytest.raises(ConnectionRefusedError):
        at(first).connect()
    go.touch()


def test_rates_are_between_two_looks() -> None:
    rates = metrics.Rates(100.0)

    def counted(calls: int, seconds: float, sent: int) -> dict[str, object]:
        done = {"operations": calls, "bytes": calls * 8_000_000, "seconds": seconds}
        link = {"bytes_sent": sent, "bytes_received": 7, "seconds_busy": seconds}
        return {"collectives": {"all_reduce": done}, "links": {"host": link}}

    first = rates.look(counted(10, 2.0, 500_000_000), 4, 102.0)
    assert first["multiring_collective_exec_time_microseconds"] == [(("all_reduce",), pytest.approx(200_000))]
    assert first["multiring_bus_bandwidth_gbs"] == [(("all_reduce",), pytest.approx(1.5 * 0.08 / 2))]
    assert first["multiring_link_bandwidth_mbs"] == [(("host",), pytest.approx(250))]
    assert rates.look(counted(50, 3.0, 700_000_000), 4, 102.5) == first
    later = rates.look(counted(50, 3.0, 600_000_000), 4, 104.0)
    assert later["multiring_collective_exec_time_microseconds"] == [(("all_reduce",), pytest.approx(25_000))]
    assert later["multiring_link_bandwidth_mbs"] == [(("host",), pytest.approx(100))]
    assert all(not found for found in rates.look(counted(50, 3.0, 600_000_000), 4, 106.0).values())


def test_ranks_are_called_as_at_the_start_of_the_job() -> None:
    zero = {"bytes_sent": 3, "bytes_received": 4, "seconds_busy": 0.5}
    counted = {
        "seconds_in_calls": 7.0,
        "seconds_waiting": 6.0,
        "collectives": {},
        "peers": {0: {"seconds_waited": 1.5}, 2: {"seconds_waited": 2.5}},
        "links": {"host": zero},
        "slowest": {"ranks": [1, 2], "host": "b", "share": 0.25, "seconds": 9.0, "reason": "sleeps"},
        "slow_link": {"from": "a", "to": "b", "both_ways": True, "bytes_per_second": 5e6, "expected": 5e7},
    }
    world = SimpleNamespace(
        rank=1,
        membership=Membership(3, (0, 4, 5), (0, 0, 2)),
        topology=SimpleNamespace(hosts=("a", "b", "b")),
        engine=SimpleNamespace(failure=lambda: None),
        left=threading.Event(),
    )
    exporter = metrics.Exporter(cast("Communicator", SimpleNamespace(world=world, size=3, stats=lambda: counted)))
    found = exporter.samples()
    assert found["multiring_slow_rank_share"] == [(("4", "sleeps"), 0.25), (("5", "sleeps"), 0.25)]
    assert found["multiring_slow_link_part"] == [(("a", "b"), 0.1), (("b", "a"), 0.1)]
    counted["slow_link"] = {"from": "a", "to": "", "both_ways": False, "bytes_per_second": 2e7, "expected": 5e7}
    assert exporter.samples()["multiring_slow_link_part"] == [(("a", ""), 0.4)]
    assert found["multiring_waited_for_seconds_total"] == [(("0",), 1.5), (("5",), 2.5)]
    assert found["multiring_link_received_bytes_total"] == [(("host",), 4)]
    assert found["multiring_generation"] == [((), 3)]
    assert (found["multiring_in_calls_seconds_total"], found["multiring_waiting_seconds_total"]) == (
        [((), 7.0)],
        [((), 6.0)],
    )
    families = {family.name: family for family in exporter.collect()}
    (sample, _) = families["multiring_slow_rank_share"].samples
    assert sample.labels == {"rank": "4", "host": "b", "peer": "4", "reason": "sleeps"}


def test_documents_and_dashboard_name_what_there_is() -> None:
    (shown,) = jobs.run(metrics_ranks.every_family, 1)
    assert set(shown) - set(metrics.FAMILIES) == set()
    assert set(metrics.FAMILIES) - set(shown) <= {
        "multiring_collective_exec_time_microseconds",  # need a window of a second
        "multiring_bus_bandwidth_gbs",
        "multiring_link_bandwidth_mbs",
    }
    rows = re.findall(r"^\| `(multiring_\w+)` \|", (ROOT / "docs/watching.md").read_text(), re.MULTILINE)
    assert rows == list(metrics.FAMILIES)
    dashboard = json.loads((ROOT / "examples/grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r'\b(multiring_\w+)\{job="\$job"\}', text)}
    assert not any("multiring_" in re.sub(r"\w+\{job", "", text) for text in expressions)
    assert named == set(metrics.FAMILIES)
    known = {label for family in metrics.FAMILIES.values() for label in family.labels} | {"rank", "host"}
    used = {
        label for text in expressions for group in re.findall(r"by \(([^)]*)\)", text) for label in group.split(", ")
    }
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    used |= {label for legend in legends for label in re.findall(r"\{\{(\w+)\}\}", legend)}
    assert used <= known
