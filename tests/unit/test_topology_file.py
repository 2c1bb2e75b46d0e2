"""Topology files: what is read from them, what is refused and how, what is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiring.planning.topology import HOST_LINK, LEVELS, RANK_LINK, Link, Place, Topology, ranks_in_host
from multiring.planning.topology_file import load, parse, text

ROOT = Path(__file__).parents[2]

SITES = """
links.rank = { rate = "80 Gbit/s" }
links.host = { rate = "10 Gbit/s", latency = "20 us" }
links.rack = { up = "1 GB/s", down = "2.5 GB/s" }

[[site]]
name = "east"
rate = "200 Mbit/s"
latency = "2.5 ms"
[[site.rack]]
name = "r0"
host = [{ name = "a", ranks = 3 }, { name = "b", down = "1 Gbit/s", cards = 2, burst = "40 kB" }]

[[site]]
name = "west"
rate = "100 kB/s"
burst = "1.5 MB"
[[site.rack]]
name = "r1"
latency = "1 ms"
[[site.rack.host]]
name = "c"
ranks = 2
"""


def test_every_key_is_understood() -> None:
    rank = Link(10e9, 10e9, RANK_LINK.latency)
    a = Place("a", Link(1.25e9, 1.25e9, 20e-6), ranks_in_host([0, 1, 2], rank))
    b = Place("b", Link(2 * 1.25e9, 2 * 1.25e8, 20e-6, 2 * 40e3), ranks_in_host([3], rank), cards=2)
    c = Place("c", Link(1.25e9, 1.25e9, 20e-6), ranks_in_host([4, 5], rank))
    r0 = Place("r0", Link(1e9, 2.5e9, 50e-6), (a, b))
    r1 = Place("r1", Link(1e9, 2.5e9, 1e-3), (c,))
    east = Place("east", Link(25e6, 25e6, 2.5e-3), (r0,))
    west = Place("west", Link(1e5, 1e5, 50e-6, 1.5e6), (r1,))
    assert parse(SITES) == Topology(LEVELS, (east, west))


def test_what_has_no_burst_is_given_none_by_those_that_have_one() -> None:
    links = [Link(5e7, 5e7, 25e-6, burst) for burst in (1e5, 1e5, 0.0, 7e4)]
    hosts = tuple(
        Place(name, link, ranks_in_host([n])) for n, (name, link) in enumerate(zip("abcd", links, strict=True))
    )
    built = Topology(LEVELS[:2], hosts)
    assert parse(text(built)) == built
    assert "burst" not in text(Topology(LEVELS[:2], (Place("a", links[2], ranks_in_host([0])),)))


def test_a_host_needs_only_a_name() -> None:
    assert parse('host = [{ name = "a" }]') == Topology(LEVELS[:2], (Place("a", HOST_LINK, ranks_in_host([0])),))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", "a list of hosts, or of racks, or of sites"),
        ('host = [{ name = "a" }]\n[[rack]]\nname = "r"', "a list of hosts, or of racks, or of sites"),
        ("hosts = []", "the file has a key 'hosts'; known are host, links, rack, site"),
        ("host = []", "the file has no host"),
        ("host = [7]", "host number 1 of the file is 7; it must be a table"),
        (
            "host = [{}]",
            'host number 1 of the file has no name: give it one, such as name = "h1", that which `hostname`',
        ),
        ('host = [{ name = "a b" }]', "a host is called 'a b'"),
        ('host = [{ name = "a\\u001b[2J" }]', "it needs a name that can be printed, without blanks"),
        ('host = [{ name = "a", ranks = 0 }]', "host a: ranks is 0"),
        ('host = [{ name = "a", ranks = 1025 }]', "host a: ranks is 1025; it must be a whole number from 1 to 1024"),
        (
            'links.rack.rate = "1 Gbit/s"\n[[rack]]\nname = "l"\nhost = [{ name = "a" }]\n'
            '[[rack]]\nname = "r"\nhost = [{ name = "b" }, { name = "a" }]',
            "there are two hosts a; every host needs a name of its own",
        ),
        ('host = [{ name = "a", cards = true }]', "host a: cards is True"),
        (
            'host = [{ name = "a", slots = 2 }]',
            "host number 1 of the file has a key 'slots'; known are burst, cards, down",
        ),
        ('host = [{ name = "a", up = "10 Mb" }]', "host a: up is '10 Mb'; it must be text, a number and its unit"),
        ('host = [{ name = "a", rate = 10 }]', "host a: rate is 10"),
        ('host = [{ name = "a", rate = "0 bit/s" }]', "host a: rate is '0 bit/s'; it must be more than 0"),
        (
            f'host = [{{ name = "a", up = "{400 * "9"} Gbit/s" }}]',
            "host a: up is '9{20}\\.\\.\\.'; it must be at most",
        ),
        (
            'links.host.latency = "9999999999999999999 s"',
            "links.host: latency is '9{19} \\.\\.\\.'; it must be at most",
        ),
        ('[[rack]]\nname = "r"\nup = "1 Gbit/s"', "rack r has up and no down: give it one"),
        (
            'links.rack.rate = "1 Gbit/s"\nrack = [{ name = "r", host = [{ name = "a" }] }, { name = "r" }]',
            "there are two racks r; every rack needs a name of its own, whatever site it is in",
        ),
        (
            'links.rack.rate = "1 Gbit/s"\nlinks.site.rate = "1 Gbit/s"\n'
            'site = [{ name = "n", rack = [{ name = "r", host = [{ name = "a" }] }] },'
            ' { name = "s", rack = [{ name = "r", host = [{ name = "b" }] }] }]',
            "there are two racks r; every rack needs a name of its own, whatever site it is in",
        ),
        (
            'links.rack.rate = "1 Gbit/s"\nlinks.site.rate = "1 Gbit/s"\n'
            'site = [{ name = "n", rack = [{ name = "r", host = [{ name = "a" }] }] }, { name = "n" }]',
            "there are two sites n; every site needs a name of its own$",
        ),
        ('links.host = { latency = "1 min" }', "links.host: latency is '1 min'; it must be text, a number"),
        ('links.rank = { burst = "70 kB" }', "links.rank has a key 'burst'; known are down, latency, rate, up"),
        ('links.host = { burst = "70 kbit" }', "links.host: burst is '70 kbit'; it must be .* kB"),
        ("links.host = 3", "links.host is 3; it must be a table"),
        ("links.card = {}", "links has a key 'card'"),
        ('[[rack]]\nname = "r"', "rack r has no rate"),
        ('links.rack = { rate = "1 Gbit/s" }\n[[rack]]\nname = "r"', "rack r has no host"),
        ("host = [", "it is no TOML: .*at end of document"),
        ('links.host = { latency = "\u0663 us" }', "links.host: latency is '\u0663 us'; it must be text, a number"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_value(file: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        parse(file)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("host = 3")
    with pytest.raises(ValueError, match=rf"^{path}: the file has no host"):
        load(path)


def test_what_is_written_is_read_back() -> None:
    assert parse(text(parse(SITES))) == parse(SITES)


@pytest.mark.parametrize("path", sorted((ROOT / "lab/topologies").glob("*.toml")), ids=lambda path: path.stem)
def test_the_topologies_of_the_lab_are_written_and_read_back(path: Path) -> None:
    assert parse(text(load(path))) == load(path)


def test_what_is_written_can_be_read_by_people() -> None:
    measured = Topology.of_hosts(["a", "a", "b", "c"], host_link=Link(118.2345e6, 118.2345e6, 41.27e-6))
    assert text(measured) == (
        'links.rank = { rate = "128 Gbit/s", latency = "1 us" }\n'
        'links.host = { rate = "946 Mbit/s", latency = "41.3 us" }\n'
        "\n"
        "host = [\n"
        '    { name = "a", ranks = 2 },\n'
        '    { name = "b", ranks = 1 },\n'
        '    { name = "c", ranks = 1 },\n'
        "]\n"
    )


def test_only_what_differs_from_the_others_is_written_to_an_entry() -> None:
    hosts = [Place(name, HOST_LINK, ranks_in_host([rank])) for rank, name in enumerate("ab")]
    slow = Place("c", Link(1e8, 5e7, 50e-6), ranks_in_host([2]))
    lines = text(Topology(LEVELS[:2], (*hosts, slow))).splitlines()
    assert '    { name = "b", ranks = 1 },' in lines
    assert '    { name = "c", ranks = 1, up = "800 Mbit/s", down = "400 Mbit/s", latency = "50 us" },' in lines


def test_the_example_of_the_documentation() -> None:
    _, _, rest = (ROOT / "docs/topology.md").read_text().partition("```toml\n")
    topology = parse(rest.partition("```")[0])
    assert topology.hosts == ("a", "a", "b", "b", "c", "c", "d")
    assert topology.places[1].link == Link(12.5e6, 25e6, 100e-6)


def test_a_file_of_too_many_hosts_is_refused() -> None:
    """Before any of them is looked at."""
    with pytest.raises(ValueError, match=r"^the file brings the hosts to 16385; a topology has 16384 at most$"):
        parse(f"host = [{', '.join(['{}'] * 16385)}]")


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "a pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(OSError, match=f"it is {kind}, and a regular file is needed") as caught:
            load(path)
        assert caught.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


def test_a_file_in_another_encoding_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes('host = [{ name = "\xe4", ranks = 2 }]'.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{file}: its byte 18 is no UTF-8: save the file in that encoding$"):
        load(file)


PRINTED = """
import sys
from pathlib import Path
from multiring.planning.topology_file import load, text
from multiring import cache
from multiring.launch.hosts import read_hostfile
found = load(Path(sys.argv[1]))
cache.keep(Path(sys.argv[2]), text(found))
assert load(Path(sys.argv[2])) == found
Path(sys.argv[3]).write_bytes("".join(f"{name}:2\\n" for name in dict.fromkeys(found.hosts)).encode())
print(ascii(found.hosts), ascii([host.name for host in read_hostfile(Path(sys.argv[3]))]))
"""


def test_files_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_bytes("\ufeff# für Übungen\r\nhost = [{ name = 'büro' }, { name = 'ζ', ranks = 2 }]\r\n".encode())
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.run(
        [sys.executable, "-c", PRINTED, str(file), str(tmp_path / "kept.toml"), str(tmp_path / "hostfile")],
        env={**os.environ, **plain},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert printed == r"('b\xfcro', '\u03b6', '\u03b6') ['b\xfcro', '\u03b6']" + "\n"
    assert "büro" in (tmp_path / "kept.toml").read_text("utf-8")
