"""The engine over MPI: executes the same schedules as the native one, by mpi4py (docs/mpi.md).

``program`` is a schedule as it is installed; ``channel`` moves bytes between the members of a communicator;
``segments`` executes a program, ``messages`` matches what two ranks send each other; ``engine`` drives both.
"""
