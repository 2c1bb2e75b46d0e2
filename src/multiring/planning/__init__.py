"""Plans for collectives, made from a topology alone; nothing here acts, measures or knows an engine.

Read the modules in this order, each of which says more in its docstring:

1. `topology`: sites, racks, hosts and ranks as a tree, with a link out of each (`topology_file` reads it from TOML).
2. `plan`: the result. A `Plan` is a list of phases; a phase is rings that run side by side; a ring is ranks that reduce
   or gather some *spans* together, fractions of the buffer. `methods` says who of a ring sends what in each step. On
   thin links a phase may send float32 in a narrower format, its *wire*; a *residual* keeps what that rounds off.
3. `layout`: a *grid* arranges the ranks in dimensions. Rings run within the *units* of a dimension, such as hosts.
4. `stages`: what a plan does in each dimension, its mode and method. `compose` turns stages into the rings of a plan,
   and shows the smallest example: two hosts of two ranks. `balance` has the shares where links are unequal.
5. `schedule`: a plan unrolled for one rank, as the list of instructions that the engine and the simulator run on every
   *segment* of the buffer. `interpret` proves that all lists together compute what the collective promises.
6. `cost`: the time that a plan takes, as a `prediction`. `traffic` says what a ring sends over the links around its
   members, `loads` adds that up by link, and `speeds` has what the ranks themselves take. No plan beats the `bound`.
7. `planner`: all stages that `space` lists are predicted, and the cheapest plan is the `choice`, which explains itself.

`strategies` and `double_tree` make plans as others published them, without a choice.
"""
