"""Plans for collectives, from a topology alone; nothing here acts, measures or knows an engine.

A topology is a tree of sites, racks, hosts and ranks with a link out of each (`topology`, `topology_file`). A *grid*
arranges the ranks in dimensions (`layout`), and one *stage* of a collective runs over each dimension (`space` lists the
choices, `compose` turns a choice into rings). A `Plan` is the result: phases of rings, each by a method such as ring,
halving or tree (`plan`, `methods`). A ring works on *spans*, fractions of the buffer; the buffer passes through all
phases in *segments*, several at a time. `compose` shows the smallest example: two hosts of two ranks. `schedule`
unrolls a plan into each rank's list of instructions, which the engine and the simulator run; `interpret` proves that
they compute what the collective promises.

`cost` predicts what a plan takes (`loads` and `traffic` say what it puts on which link, `speeds` what ranks can do),
`bound` what none can beat, and `planner` compares all candidates by that: its `Choice` (`choice`) explains itself.
A reader starts with `topology`, `plan` and `methods`, then follows `planner.choose`.
"""
