"""torch's promises about a work and its future, in every order of asking."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_helpers import caught, everyone, group, own, same, tell, wait_for
from torch_ranks import run, values
from workers import worker, workers

import multiring
from multiring.torch.work import OrderedWatcher, TorchWork, Watcher


@worker
def futures_of_works_that_were_waited_for() -> None:
    with group() as (rank, size):
        expected = everyone(size, 50).sum(0)
        works, futures = [], []
        for _ in range(300):
            works.append(dist.all_reduce(own(rank, 50), async_op=True))
            futures.append(works[-1].get_future())
        for work, future in reversed(list(zip(works, futures, strict=True))):
            work.wait()
            assert future.done()
            same(future.value()[0], expected)
        for number in range(300):
            outputs = [torch.empty(50) for _ in range(size)]
            work = dist.all_gather(outputs, own(rank, 50), async_op=True)
            future = work.get_future() if number % 2 else None
            while not work.is_completed():
                pass
            future = future or work.get_future()
            assert future.done()
            assert work.get_future() is future
            same(torch.stack(future.value()[0]), everyone(size, 50))
        message = torch.empty(3)
        sent = dist.isend(own(rank, 3), (rank + 1) % size)
        received = dist.irecv(message, (rank - 1) % size)
        future = received.get_future()
        received.wait()
        same(future.value()[0], own((rank - 1) % size, 3))
        sent.wait()
        assert sent.get_future().done()


@worker
def futures_of_every_collective() -> None:
    with group() as (rank, size):

        def each() -> list[torch.Tensor]:
            return [own(rank, 4) for _ in range(size)]

        def pair(root: int) -> list[torch.Tensor] | None:
            return each() if rank == root else None

        sparse = torch.eye(3).to_sparse()
        started: dict[str, Callable[[], dist.Work]] = {
            "barrier": lambda: dist.barrier(async_op=True),
            "reduce": lambda: dist.reduce(own(rank, 4), 0, async_op=True),
            "broadcast": lambda: dist.broadcast(own(rank, 4), 0, async_op=True),
            "all_gather_into": lambda: dist.all_gather_into_tensor(torch.empty(4 * size), own(rank, 4), async_op=True),
            "gather": lambda: dist.gather(own(rank, 4), pair(0), async_op=True),
            "scatter": lambda: dist.scatter(torch.empty(4), pair(0), async_op=True),
            "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(4), each(), async_op=True),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
                torch.empty(4), own(rank, 4 * size), async_op=True
            ),
            "all_to_all": lambda: dist.all_to_all(each(), each(), async_op=True),
            "all_to_all_single": lambda: dist.all_to_all_single(
                torch.empty(4 * size), own(rank, 4 * size), async_op=True
            ),
            "sparse": lambda: dist.all_reduce(sparse.clone(), async_op=True),
            "coalesced": lambda: dist.group.WORLD.allreduce_coalesced([own(rank, 4), own(rank, 4)]),
        }
        for name, start in started.items():
            for number in range(20):
                work = start()
                future = work.get_future() if number % 2 else None
                work.wait()
                future = future or work.get_future()
                assert future.done(), name
                assert future.then(lambda _: 7).value() == 7, name
                assert work.is_completed(), name
                assert work.exception() is None, name


@worker
def callbacks_after_and_before() -> None:
    with group() as (rank, size):
        work = dist.all_reduce(own(rank, 5), async_op=True)
        early = work.get_future().then(lambda future: future.value()[0] * 2)
        work.wait()
        late = work.get_future().then(lambda future: future.value()[0] * 3)
        assert late.done()
        same(late.value(), everyone(size, 5).sum(0) * 3)
        same(early.wait(), everyone(size, 5).sum(0) * 2)
        called: list[Any] = []
        work.get_future().add_done_callback(called.append)
        assert called == [work.get_future()]
        assert work.result()[0] is work.get_future().value()[0]


@worker
def callbacks_that_wait_for_their_waiter() -> None:
    """A callback may need what the thread holds that waits for the work."""
    with group() as (rank, size):
        for number in range(50):
            held, done = threading.Lock(), threading.Event()

            def callback(_: Any, held: threading.Lock = held, done: threading.Event = done) -> None:
                with held:
                    done.set()

            before = dist.all_reduce(own(rank, 100_000), async_op=True)
            before.get_future()
            work = dist.all_reduce(own(rank, 10 * number), async_op=True)
            work.get_future().add_done_callback(callback)
            with held:
                work.wait(timedelta(seconds=60))
                assert work.get_future().done()
            assert done.wait(60)
            before.wait()
        works = [dist.all_reduce(own(rank, 7), async_op=True) for _ in range(2)]
        later = works[1].get_future()
        within = works[0].get_future().then(lambda _: works[1].wait() and later.done())
        assert within.wait()
        same(later.value()[0], everyone(size, 7).sum(0))


@worker
def many_threads() -> None:
    with group() as (rank, size):
        expected = everyone(size, 20).sum(0)
        for _ in range(30):
            work = dist.all_reduce(own(rank, 20), async_op=True)
            seen: list[Any] = []

            def ask(number: int, work: dist.Work = work, seen: list[Any] = seen) -> None:
                if number % 2:
                    work.wait()
                    assert work.get_future().done()
                seen.append((work.get_future(), work.get_future().wait()[0]))

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert len({id(future) for future, _ in seen}) == 1
            assert len(seen) == 8
            for _, x in seen:
                same(x, expected)


@pytest.mark.parametrize("worker", workers(__name__), ids=lambda worker: worker.__name__)
def test_futures_are_done_for_who_knows_the_outcome(worker: Callable[[], None]) -> None:
    values(worker)


def futures_of_failed_works() -> str:
    with group() as (rank, size):
        if rank == size - 1:
            wait_for("called")
            os.kill(os.getpid(), signal.SIGKILL)
        works = [dist.all_reduce(own(rank, 1000), async_op=True) for _ in range(3)]
        early = works[0].get_future()
        chained = works[1].get_future().then(lambda future: future.value())
        tell("called")
        messages = []
        for work in works:
            messages.append(str(caught(multiring.PeerLost, work.wait)))
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), multiring.PeerLost)
            assert isinstance(caught(multiring.PeerLost, work.result), multiring.PeerLost)
            assert work.get_future().done()
            messages.append(str(caught(RuntimeError, work.get_future().value)))
            messages.append(str(caught(RuntimeError, work.get_future().then(lambda future: future.value()).value)))
        assert early is works[0].get_future()
        messages.append(str(caught(RuntimeError, chained.wait)))
        assert all("rank 1" in message for message in messages), messages
        return "named"


def test_futures_of_failed_works_are_done_and_raise() -> None:
    survivor, dead = run(futures_of_failed_works)
    assert not survivor.error, survivor.error
    assert survivor.value == "named"
    assert dead.exitcode == -signal.SIGKILL


def asked_by_the_device() -> None:
    with group() as (rank, size):
        cpu, here = torch.device("cpu"), dist.group.WORLD
        backend = here._get_backend(cpu)
        assert (backend.name(), backend.rank(), backend.size()) == ("multiring", rank, size)
        assert not backend.supports_splitting
        assert not backend.supports_tensor_alloc(cpu)
        here._set_sequence_number_for_group()
        before = here._get_sequence_number_for_group()
        x = own(rank, 3)
        backend.allreduce([x]).wait()
        same(x, everyone(size, 3).sum(0))
        assert here._get_sequence_number_for_group() == backend._get_sequence_number_for_group() == before + 1
        assert "device type meta" in str(caught(RuntimeError, lambda: here._get_backend(torch.device("meta"))))
        assert dist.distributed_c10d._get_process_group_uid(here) == -1
        some = dist.new_group([0, 1])
        for asked, seconds in ((None, 0.6), (some, 0.5)):
            dist.barrier(group=asked)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), asked)
            assert (some if asked else here)._timeout == seconds
            options = (some if asked else here)._get_backend(cpu).options
            assert (options.backend, options._timeout) == ("multiring", timedelta(seconds=seconds))
        if rank == 0:
            error = caught(multiring.CollectiveTimeout, lambda: dist.all_reduce(own(rank, 3), group=some))
            assert "0.5 s" in str(error), error
            tell("timed out")
        else:
            wait_for("timed out")


def test_what_torch_asks_of_the_backend_of_a_device_is_answered() -> None:
    values(asked_by_the_device)


def synchronous_calls_offered_natively() -> None:
    with group() as (rank, size):
        members, offered = dist.group.WORLD.group, []
        natively = members.calls

        class Spy:
            """The calls of the group, of which those that are offered are noted."""

            run = natively.run

            def all_reduce_plain(self, *arguments: Any) -> bool:
                offered.append(arguments)
                return natively.all_reduce_plain(*arguments)

        members.calls = Spy()
        for x in (own(rank, 6), own(rank, 6).requires_grad_(), own(rank, 6).view(2, 3).t(), own(rank, 12)[::2]):
            expected = sum(own(peer, x.numel()) for peer in range(size)) if x.is_contiguous() else None
            offered.clear()
            dist.all_reduce(x)
            assert len(offered) == 1, x
            if expected is not None:
                same(x.detach(), expected)


def test_a_tensor_is_offered_to_the_native_call_once() -> None:
    values(synchronous_calls_offered_natively)


class Late:
    """A part that is done when it is told, and was in flight when its waiter's time was up."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome


def test_a_time_limit_that_is_up_as_the_call_ends_is_no_error_of_the_call() -> None:
    work = TorchWork([Late(TimeoutError("up"), None)], ["result"], watcher=Watcher())
    assert work.wait(timedelta(seconds=1))
    assert work.is_success()
    assert work.get_future().value() == ["result"]


def test_what_fails_in_the_end_is_the_work_s_error_and_is_tried_once() -> None:
    tries = []

    def finish() -> None:
        tries.append(1)
        raise ValueError("no room")

    work = TorchWork([], ["result"], [finish], watcher=OrderedWatcher())
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            work.wait()
    assert tries == [1]
    assert future.done()
    with pytest.raises(RuntimeError, match="ValueError: no room"):
        future.value()
