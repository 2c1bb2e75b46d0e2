"""Messages between launcher and agent: a JSON object on a line of its own.

=============  =====================================  =====================================================
to the agent   fields                                 meaning
=============  =====================================  =====================================================
``prepare``    program directory environment host     check the program and divide the cores; answered by
               first count binding standby fork       ``ready``; ``former`` are agents lost here before, by their
               former lifeline                        processes and when these began: kill them and all below;
                                                      ``lifeline`` leads to the store, where only ssh leads here
``listen``     everywhere                             open a port for rank 0; answered by ``listening``
``reach``      addresses port                         try them; answered by ``reached``
``warm``       variables left                         a spare host: have standbys
``start``      secret variables terminal left         start the ranks; ``exit`` follows for each; ``left``
                                                      replacements are left
``replace``    rank number left                       start a rank again, for the others to admit, or with
                                                      number 0 as at first; ``exit`` follows
``input``      text                                   for rank 0's standard input; empty: no more of it
``window``     rows columns                           the size of the terminal
``signal``     number without                         send a signal to the ranks not in ``without``
``look``                                              answered by ``seen``
``beat``                                              answered by ``beat``, even while another is carried out
``kill``                                              kill the ranks and all that they started
``finish``                                            pass on the last output, kill what is left over;
                                                      answered by ``finished``
``done``       code                                   the job's exit code
``refuse``     text                                   the agent cannot take part
=============  =====================================  =====================================================

=============  =====================================  =====================================================
to launcher    fields                                 meaning
=============  =====================================  =====================================================
``hello``      version host machine process typed     the agent is there, on which machine, by its process and
                                                      when that began; what was typed there, if anything
``ready``      shares                                 what each rank will be bound to, in words
``error``      text                                   the host cannot do what was asked
``listening``  port addresses                         the addresses of the host, if asked for
``reached``    addresses                              those that answered
``output``     rank stream text                       stream 1 or 2
``exit``       rank code                              negative: the signal that ended it
``seen``       first ranks                            what each rank that was started says that it does,
                                                      how many seconds ago, and whether it is stopped
``beat``                                              the agent is there
``taken``                                             the last ``input`` has been read
``note``       text                                   what the launcher is to say of the host
``finished``
=============  =====================================  =====================================================
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any

LIMIT = 1 << 26
"""Longest line; an environment is the longest thing sent."""

ASK_SECONDS = 1.0
"""Seconds after which who cannot write asks whether the reader is lost, and again after as many."""

Message = dict[str, Any]


def encode(kind: str, **fields: Any) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """The message of a line; None if it is none, such as what a shell prints when one logs in."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None


def to_text(data: bytes) -> str:
    """Any bytes as text that JSON can carry; `to_bytes` restores them."""
    return data.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def write_all(descriptor: int, data: bytes, is_lost: Callable[[], bool] = lambda: False) -> bool:
    """Write everything, waiting where the descriptor is non-blocking, as another process may have made it.

    False if meanwhile ``is_lost`` says that nobody will ever read it.
    """
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            _, writable, _ = select.select((), (descriptor,), (), ASK_SECONDS)
            if not writable and is_lost():
                return False
    return True
