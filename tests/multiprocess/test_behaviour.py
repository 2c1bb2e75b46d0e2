"""Ranks used as people use them: none hangs its peers, each failure names who is to blame."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import behaviour
import jobs
import pytest

PLACES = [pytest.param(None, id="shared"), pytest.param("abc", id="tcp"), pytest.param("aab", id="mixed")]
TWO = PLACES[::2]


@pytest.mark.parametrize("hosts", TWO)
def test_forking_while_collectives_run(hosts: str | None) -> None:
    outcomes = jobs.start(behaviour.fork_while_collectives_run, 3, hosts=hosts).wait()
    assert [(outcome.code, outcome.value, outcome.error) for outcome in outcomes] == [(0, [7] * 6, "")] * 3


@pytest.mark.parametrize("hosts", TWO)
def test_a_forked_process_does_not_hide_that_its_parent_died(hosts: str | None) -> None:
    job = jobs.start(behaviour.die_with_a_living_child, 3, hosts=hosts)
    child = int(job.line(1).split()[1])
    outcomes = job.wait(30)
    os.kill(child, signal.SIGKILL)
    assert outcomes[1].code == -signal.SIGKILL
    for rank in (0, 2):
        kind, culprit, _, seconds = outcomes[rank].value
        assert (kind, culprit) == ("PeerLost", 1)
        assert seconds < 5


def test_a_time_limit_may_be_endless() -> None:
    endless = jobs.start(behaviour.wait_without_end, 2, environment={"MULTIRING_TIMEOUT": "1e10"}).wait()
    assert [(outcome.code, outcome.value, outcome.error) for outcome in endless] == [(0, [6.0, 6.0], "")] * 2


def test_interrupting_a_blocked_collective() -> None:
    job = jobs.start(behaviour.interrupted, 2)
    assert job.line(0) == "blocked"
    time.sleep(0.5)
    job.signal(0, signal.SIGINT)
    interrupted, other = (outcome.value for outcome in job.wait(20))
    assert interrupted[0] == "KeyboardInterrupt"
    assert interrupted[1] < 5
    assert other[:2] == ["PeerLost", 0]


@pytest.mark.parametrize("hosts", PLACES)
def test_init_after_shutdown(hosts: str | None) -> None:
    assert jobs.run(behaviour.again, 3, hosts=hosts) == [0, 0, 0]


@pytest.mark.parametrize("hosts", TWO)
@pytest.mark.parametrize(
    ("text", "told"),
    [("no such sample: 42", "no such sample: 42"), ("no file a\udcff.npy", "no file a\\udcff.npy")],
    ids=["text", "no-unicode"],
)
def test_an_exception_between_two_collectives(text: str, told: str, hosts: str | None) -> None:
    outcomes = jobs.start(behaviour.fail_between_collectives, 3, text, hosts=hosts).wait(30)
    assert outcomes[1].code == 1
    assert outcomes[1].error.splitlines()[-1] == f"ValueError: {told}"
    for rank in (0, 2):
        kind, culprit, message, seconds = outcomes[rank].value
        assert (kind, culprit) == ("PeerLost", 1)
        assert "rank 1" in message
        assert f"ended with ValueError: {told}" in message
        assert seconds < 5


@pytest.mark.parametrize("when", ["unseen", "seen", "attached"])
@pytest.mark.parametrize(("hosts", "victim"), [("aaa", 1), ("aab", 2), ("aba", 2)])
def test_a_rank_killed_during_init_is_named_long_before_the_time_limit(hosts: str, victim: int, when: str) -> None:
    limit = {"MULTIRING_INIT_TIMEOUT": "300"}
    job = jobs.start(behaviour.killed_while_attaching, 3, victim, when, hosts=hosts, environment=limit)
    outcomes = job.wait(60)
    for rank in {0, 1, 2} - {victim}:
        kind, culprit, message, _ = outcomes[rank].value
        assert (kind, culprit) == ("RendezvousError", victim), message
        assert f"rank {victim}" in message


@pytest.mark.parametrize(
    ("before", "hosts", "victim", "replaced"),
    [
        (90.0, "abbab", 2, "1"),
        (0.3, "aaba", 3, "1"),
        (0.3, "abbab", 2, "0"),
        (0.3, "abbab", 2, "1"),
        (-1.0, "abbab", 2, "0"),
        (-1.0, "abbab", 2, "1"),
    ],
)
def test_all_name_the_rank_that_is_lost_at_any_moment_of_init(
    before: float, hosts: str, victim: int, replaced: str
) -> None:
    """Be it that a launcher, which here says nothing, may start it again."""
    limits = {"MULTIRING_INIT_TIMEOUT": "8", "MULTIRING_MAX_REPLACEMENTS": replaced}
    job = jobs.start(behaviour.lost_while_attaching, len(hosts), victim, before, hosts=hosts, environment=limits)
    others = [rank for rank in range(len(hosts)) if rank != victim]
    assert [job.line(rank) for rank in others] == ["ended"] * len(others)
    job.signal(victim)
    outcomes = job.wait()
    told = {rank: outcomes[rank].value for rank in others}
    assert all(value[:2] == ["RendezvousError", victim] for value in told.values()), told


def test_a_slip_at_the_prompt_is_not_why_a_session_ends() -> None:
    left, _ = (outcome.value for outcome in jobs.start(behaviour.leave_an_interactive_session, 2).wait(30))
    assert left[:2] == ["PeerLost", 1]
    assert "rank 1" in left[2]
    assert "has shut down" in left[2]


@pytest.mark.parametrize("hosts", TWO)
def test_leaving_early_is_told_to_who_still_waits(hosts: str | None) -> None:
    outcomes = jobs.start(behaviour.leave_early, 3, hosts=hosts).wait(30)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    for rank in (0, 2):
        kind, culprit, message, _ = outcomes[rank].value
        assert kind == "PeerLost", message
        assert culprit == 1 or rank == 2  # rank 2 may hear first that rank 0 has left for the same reason


@pytest.mark.parametrize("hosts", ["aba", "abc"])
def test_leaving_before_there_was_any_contact_is_told_at_once(hosts: str) -> None:
    outcomes = jobs.start(behaviour.leave_before_any_contact, 3, hosts=hosts).wait(60)
    assert outcomes[1].code == 0
    for rank in (0, 2):
        kind, culprit, message, seconds = outcomes[rank].value
        assert (kind, culprit) == ("PeerLost", 1), message
        assert "rank 1 (host b)" in message  # has shut down, or has closed a connection that was just being made
        assert seconds < 30  # the time limit is 10 minutes


def test_a_message_of_who_has_left_is_not_waited_for_wherever_it_was() -> None:
    """Ranks 1 and 2 have no control connection: it is rank 0 that tells of the farewell."""
    outcomes = jobs.start(behaviour.leave_before_a_message, 3, hosts="abc").wait(60)
    for rank in (0, 1):
        kind, culprit, message, seconds = outcomes[rank].value
        assert (kind, culprit) == ("PeerLost", 2), message
        assert "rank 2 (host c)" in message
        assert seconds < 30


def test_leaving_is_told_to_a_host_whose_lowest_rank_has_left_before() -> None:
    """Ranks 1 and 3 have no connection at all: it is rank 2 that tells of the farewell."""
    outcomes = jobs.start(behaviour.leave_after_the_lowest, 4, hosts="aaab").wait(60)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0]
    for rank in (1, 2):
        kind, culprit, message, seconds = outcomes[rank].value
        assert (kind, culprit) == ("PeerLost", 3), message
        assert "rank 3 (host b) has shut down" in message
        assert seconds < 30  # the time limit is 10 minutes


@pytest.mark.parametrize("hosts", PLACES)
def test_any_source_needs_only_one_that_has_not_left(hosts: str | None) -> None:
    outcomes = jobs.start(behaviour.receive_from_who_is_left, 3, hosts=hosts).wait(60)
    source, received, (kind, culprit, message, seconds) = outcomes[0].value
    assert (source, received) == (1, [11] * 5)
    assert kind == "PeerLost", message
    assert culprit in (1, 2)
    assert seconds < 30
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]


@pytest.mark.parametrize("hosts", TWO)
def test_leaving_without_shutdown(hosts: str | None) -> None:
    outcomes = jobs.start(behaviour.leave_without_shutdown, 3, hosts=hosts).wait(30)
    assert [(outcome.code, outcome.value, outcome.error) for outcome in outcomes] == [(0, "ended", "")] * 3


@pytest.mark.parametrize("hosts", PLACES)
@pytest.mark.parametrize("nbytes", [4096, 40_000_000])
def test_a_killed_rank_is_named_by_all_survivors(hosts: str | None, nbytes: int) -> None:
    job = jobs.start(behaviour.until_lost, 3, nbytes, hosts=hosts)
    for rank in range(3):
        assert job.line(rank) == "running"
    time.sleep(0.3)
    killed = time.time()
    job.signal(1)
    outcomes = job.wait(30)
    for rank in (0, 2):
        kind, culprit, message, again, leaving, ended = outcomes[rank].value
        assert (kind, culprit, again) == ("PeerLost", 1, "PeerLost"), message
        assert "rank 1" in message
        assert leaving < 5
        assert ended - killed < 2 + leaving


@pytest.mark.parametrize("hosts", TWO)
def test_a_job_that_is_stopped_and_goes_on_blames_nobody(hosts: str | None, tmp_path: Path) -> None:
    job = jobs.start(behaviour.until_told, 3, str(tmp_path / "end"), hosts=hosts)
    for rank in range(3):
        assert job.line(rank) == "running"
    for number, seconds in ((signal.SIGSTOP, 6), (signal.SIGCONT, 1)):
        for rank in range(3):
            job.signal(rank, number)
        time.sleep(seconds)
    (tmp_path / "end").touch()
    assert [outcome.value[:3] for outcome in job.wait(30)] == [["nothing", -1, ""]] * 3


def test_who_is_late_is_named() -> None:
    outcomes = jobs.run(behaviour.late, 3, 3.0)
    for rank in (0, 1):
        kind, culprit, message, _ = outcomes[rank]
        assert kind == "CollectiveTimeout", message
        assert culprit == 2


@pytest.mark.parametrize(
    ("collective", "named_by", "hosts"),
    [("broadcast", (0, 1), None), ("broadcast", (0, 1), "abc"), ("scatter", (0, 1), None), ("send", (0,), None)],
)
def test_who_is_late_for_a_root_that_ran_ahead_is_named(
    collective: str, named_by: tuple[int, ...], hosts: str | None
) -> None:
    job = jobs.start(behaviour.late_behind_a_root, 3, collective, hosts=hosts)
    for rank in named_by:
        assert job.line(rank) == "raised"
    job.signal(2)
    outcomes = job.wait(30)
    for rank in named_by:
        kind, culprit, message, _ = outcomes[rank].value
        assert (kind, culprit) == ("CollectiveTimeout", 2), message
        assert "rank 2 (host" in message


def test_who_has_no_descriptors_left_is_named() -> None:
    """At once, and not when the time for making links is over."""
    for kind, culprit, message, *_, seconds in jobs.run(behaviour.without_descriptors, 3, hosts="abc", fresh=True):
        assert (kind, culprit) == ("ResourceError", 1), message
        assert "Too many open files (raise ulimit -n)" in message
        assert seconds < 15


def test_who_has_no_memory_left_is_named() -> None:
    environment = {"MULTIRING_ARENA_BYTES": "12M"}
    for kind, culprit, message, _ in jobs.run(behaviour.without_memory, 3, environment=environment):
        assert (kind, culprit) == ("ResourceError", 1), message
        assert message.startswith("rank 1 (host")
        assert "out of shared memory" in message


@pytest.mark.parametrize("hosts", [None, "ab"])
@pytest.mark.parametrize(
    ("what", "called", "rest"),
    [
        ("count", ("all_reduce(count=6)", "all_reduce(count=7)"), ""),
        ("dtype", ("all_reduce(dtype=float32)", "all_reduce(dtype=int32)"), ""),
        ("both", ("all_reduce(dtype=float32, count=6)", "all_reduce(dtype=int32, count=7)"), ""),
        ("op", ("all_reduce(op=sum)", "all_reduce(op=max)"), ""),
        ("root", ("broadcast(root=0)", "broadcast(root=1)"), ""),
        (
            "collective",
            ("all_reduce(dtype=float32, count=6, op=sum)", "broadcast(dtype=float32, count=6, root=0)"),
            "",
        ),
        ("barrier", ("all_reduce(dtype=float32, count=6, op=sum)", "barrier()"), ""),
        ("ahead", ("all_reduce(count=6)", "all_reduce(count=8)"), ""),
        ("behind", ("barrier()", "all_reduce(dtype=float32, count=6, op=sum)"), ""),
        ("inputs", ("all_gather(count=6)", "all_gather(count=7)"), ""),
        (
            "label",
            ("all_reduce(label=1cee9c)", "all_reduce(label=f5106c)"),
            "\nlabel 1cee9c: 2 gradients: kernel, bias\nlabel f5106c: 2 gradients: bias, kernel",
        ),
        (
            "unlabelled",
            ("all_reduce(label=1cee9c)", "all_reduce(no label)"),
            "\nlabel 1cee9c: 2 gradients: kernel, bias",
        ),
    ],
)
def test_a_mismatch_begins_with_what_each_rank_called_and_shows_only_what_differs(
    what: str, called: tuple[str, str], rest: str, hosts: str | None
) -> None:
    number = 1 if what == "behind" else 0
    for kind, _, message, _ in jobs.run(behaviour.disagree, 2, what, hosts=hosts):
        assert kind == "Mismatch", message
        first_line, _, lines = message.partition("\n")
        found = re.fullmatch(
            r"rank 0 \(host \S+\) called (.+), rank 1 \(host \S+\) called (.+): ranks disagree on call number (\d) of "
            r"communicator 0(; in flight here: \w+ number \d of communicator 0|; this \w+ was not started)?",
            first_line,
        )
        assert found, message
        assert found.groups()[:3] == (*called, str(number)), message
        assert sorted(lines.splitlines()) == sorted(rest.split("\n")[1:]), message


@pytest.mark.parametrize("hosts", [None, "aabb"])
@pytest.mark.parametrize("what", ["count", "op", "collective"])
def test_who_disagrees_with_most_is_named_by_all_of_them(what: str, hosts: str | None) -> None:
    for rank, told in enumerate(jobs.run(behaviour.disagree_with_most, 4, what, hosts=list(hosts) if hosts else None)):
        message, culprit, host, collective, number = told
        pair = {int(side) for side in re.findall(r"rank (\d) \(host \w+\) called ", message)}
        assert 1 in pair
        assert len(pair) == 2, message
        assert f"rank {culprit} (host {host}) called " in message
        assert collective == ("broadcast" if rank == 1 and what == "collective" else "all_reduce"), (rank, told)
        if "was not started" in message:
            assert (culprit, number) == (max(pair), -1), (rank, told)
        else:
            assert culprit == 1 if rank != 1 else {1, culprit} == pair, (rank, told)
            assert number == 0, (rank, told)


@pytest.mark.parametrize("hosts", [None, "ab"])
@pytest.mark.parametrize("what", ["broadcast", "reduce"])
def test_a_last_call_that_was_not_the_same_is_told_on_leaving(what: str, hosts: str | None) -> None:
    seen = jobs.run(behaviour.disagree_last, 2, what, hosts=hosts)
    told = [message for kind, _, message, _ in seen if kind == "Mismatch"]
    assert told, seen
    for message in told:
        for rank in range(2):
            root = rank if what == "broadcast" else 1 - rank
            assert re.search(rf"rank {rank} \(host \w+\) called {what}\(root={root}\)", message)


@pytest.mark.parametrize(("code", "ends_with"), [(0, 1), (3, 3)])
def test_a_mismatch_that_the_exit_finds_is_printed_and_fails_the_process(code: int, ends_with: int) -> None:
    outcomes = jobs.start(behaviour.end_in_disagreement, 2, code).wait(30)
    found = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error]
    assert found or any("broadcast: Mismatch" in outcome.output for outcome in outcomes), outcomes
    for rank, outcome in found:
        assert outcome.code == ends_with, outcome
        assert outcome.output == "broadcast: nothing\nhook\n"
        (line,) = outcome.error.splitlines()
        assert re.match(rf"multiring: rank {rank} \(host \S+\): Mismatch: rank 0 ", line)
        assert re.search(
            r"rank 0 \(host \S+\) called broadcast\(root=0\), rank 1 \(host \S+\) called broadcast\(root=1\): ranks "
            r"disagree on call number 1 of communicator 0$",
            line,
        )


def test_tags_that_are_none_are_refused() -> None:
    expected = [
        "ValueError: tag=-3: a tag is 0 to 2**63 - 1; negative ones are multiring's own",
        "ValueError: tag=9223372036854775808: a tag is 0 to 2**63 - 1; negative ones are multiring's own",
        "TypeError: tag='a': a tag is a whole number",
    ]
    assert jobs.run(behaviour.wrong_tags, 2) == [2 * expected] * 2


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_ranks_that_wait_for_each_other_see_why(hosts: str | None) -> None:
    for kind, _, message, seconds in jobs.run(behaviour.crossed_reduce, 2, hosts=hosts):
        assert kind == "Mismatch", message
        assert seconds < 10


@pytest.mark.parametrize(
    ("what", "sides"),
    [
        ("gather", ("called gather(count=3)", "called gather(count=4)")),
        ("scatter", ("called scatter(count=3)", "called scatter(count=4)")),
        ("all_to_all", ("called all_to_all(count=1)", "called all_to_all(count=2)")),
    ],
)
def test_a_mismatch_names_the_collective_that_was_called(what: str, sides: tuple[str, str]) -> None:
    seen = jobs.run(behaviour.disagree_in, 2, what)
    for kind, _, message, _ in seen:
        assert kind == "Mismatch", message
        assert all(side in message for side in sides), message


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_what_is_left_of_a_job_says_that_it_is_over(hosts: str | None) -> None:
    for seen in jobs.run(behaviour.use_what_was_left, 2, hosts=hosts):
        for kind, message in seen[:4] + seen[5:]:
            assert kind == "MultiringError", message
            assert "was shut down: call multiring.init() again" in message
        assert seen[4][0] in ("MultiringError", "PeerLost")  # the other may have left first


def test_a_group_that_members_see_differently() -> None:
    first, second = jobs.start(behaviour.disagree_on_a_group, 2).wait()
    message = "rank 1 makes a group of [1, 0], rank 0 one of [0, 1]"
    assert second.value[:3] == ["Mismatch", 0, message]
    assert (second.code, second.error) == (0, "")  # it was caught
    # The part of rank 0 was done when it had sent the number: it may be gone before it hears.
    assert first.code == (1 if message in first.error else 0)


@pytest.mark.parametrize("hosts", TWO)
def test_two_communicators_interleaved(hosts: str | None) -> None:
    jobs.run(behaviour.interleaved, 3, hosts=hosts)


def test_who_did_not_arrive() -> None:
    environment = {"MULTIRING_INIT_TIMEOUT": "1.5"}
    outcomes = jobs.start(behaviour.arrive, 3, 1, 4.0, environment=environment).wait(30)
    for rank in (0, 2):
        assert "RendezvousError: rank 1 did not arrive (arrived: 0, 2), within 1.5 s" in outcomes[rank].error
    assert outcomes[1].code == 1


@pytest.mark.parametrize("hosts", TWO)
def test_a_plan_knows_what_its_calls_took(hosts: str | None) -> None:
    outcomes = jobs.start(behaviour.measure_plans, 2, hosts=hosts).wait()
    assert [outcome.value for outcome in outcomes] == [[4, 3 * 4096 + 6000, True]] * 2
