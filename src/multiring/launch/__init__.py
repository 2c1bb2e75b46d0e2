"""``multiring run``: the launcher, and one agent on each host that starts and watches its ranks.

::

    launcher (launcher.py) --- lines of JSON ---> agent (agent.py) ---> rank, rank, ...
       |   the store, the terminal                  on each host
       `-- connection.py: to a fork of itself here (forked.py), over ssh (ssh.py), or
           to a host where the same command was typed (join.py)

The launcher decides, the agents do: they start ranks, pass on their output, and kill all that they started as soon as
the launcher is gone. ``messages.py`` lists what the two say to each other. ``watch.py`` is where others ask the
launcher how the job does.
"""

from multiring.errors import MultiringError


class LaunchError(MultiringError):
    """The job cannot be started as asked; the message says why and what to do."""
