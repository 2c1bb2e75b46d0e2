"""``multiring run`` at a terminal: rank 0 has it, the others do not."""

from __future__ import annotations

import re
from pathlib import Path

from launching import COMMAND, Launch, wait_until
from terminals import at_terminal, exit_code


def test_rank_0_sees_a_terminal_and_the_others_do_not(launch: Launch) -> None:
    script = launch.script("""
        import os, sys
        print("terminals", [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)])
        if os.environ["RANK"] == "0":
            print("size", *os.get_terminal_size())
    """)
    with at_terminal(launch, *COMMAND, "-n", "2", script) as (pid, screen):
        text = screen.read_to_end()
        assert exit_code(pid) == 0
    assert "[1] terminals [False, False, False]\r\n" in text
    assert re.search(r"(^|\n)terminals \[True, True, True\]\r\nsize 100 30\r\n", text)


def test_rank_0_is_spoken_to(launch: Launch) -> None:
    script = launch.script("""
        import os
        if os.environ["RANK"] == "0":
            print("hello", input("name? "))
            answer = 6
            breakpoint()
            print("answer", answer)
    """)
    with at_terminal(launch, *COMMAND, "-n", "2", script) as (pid, screen):
        screen.expect(r"name\? ")
        screen.type("ada\n")
        screen.expect("hello ada\r\n")
        screen.expect(r"\(Pdb\) ")
        screen.type("answer = answer * 7\n")
        screen.expect(r"(?s)\(Pdb\) .*\(Pdb\) ")
        screen.type("continue\n")
        assert "answer 42\r\n" in screen.read_to_end()
        assert exit_code(pid) == 0


def test_a_line_of_another_rank_does_not_land_in_a_progress_bar(launch: Launch) -> None:
    script = launch.script("""
        import os, time
        if os.environ["RANK"] == "0":
            print("\\r 10 %", end="")
            open("bar", "w").close()
            while not os.path.exists("line"):
                time.sleep(0.01)
            time.sleep(1.0)
            print("\\r100 %")
        else:
            while not os.path.exists("bar"):
                time.sleep(0.01)
            time.sleep(0.1)
            print("line")
            open("line", "w").close()
    """)
    with at_terminal(launch, *COMMAND, "-n", "2", script) as (pid, screen):
        assert screen.read_to_end() == "\r 10 %\r\n[1] line\r\n\r100 %\r\n"
        assert exit_code(pid) == 0


def test_rank_0_learns_the_new_size_of_the_terminal(launch: Launch) -> None:
    script = launch.script("""
        import os, time
        print("ready")
        while os.get_terminal_size().columns == 100:
            time.sleep(0.01)
        print("columns", os.get_terminal_size().columns)
    """)
    with at_terminal(launch, *COMMAND, "-n", "1", script) as (pid, screen):
        screen.expect("ready")
        screen.resize(40, 70)
        assert "columns 70" in screen.read_to_end()
        assert exit_code(pid) == 0


COUNTS_INTERRUPTS = """
    import os, sys, time
    print("ready", os.environ["RANK"])
    interrupts = 0
    end = time.monotonic() + 100
    while time.monotonic() < end:
        try:
            time.sleep(0.5 if interrupts else 100)
            break
        except KeyboardInterrupt:
            interrupts += 1
    print("interrupts", interrupts)
"""


def test_ctrl_c_interrupts_every_rank_once(launch: Launch) -> None:
    with at_terminal(launch, *COMMAND, "-n", "2", launch.script(COUNTS_INTERRUPTS)) as (pid, screen):
        screen.expect("ready 0")
        screen.expect("ready 1")
        screen.type("\x03")
        text = screen.read_to_end()
        assert exit_code(pid) == 130
        assert launch.processes() == []
    assert sorted(re.findall(r"(?:\[1\] )?interrupts \d", text)) == ["[1] interrupts 1", "interrupts 1"]
    assert text.endswith("multiring: ended by SIGINT\r\n")


def test_a_job_in_the_background_is_not_stopped(launch: Launch) -> None:
    script = launch.script("import sys, time; print('begin'); time.sleep(0.5); print('end')")
    shell = f"set -m; {' '.join(COMMAND)} -n 2 {script} & wait $!; echo code $?"
    with at_terminal(launch, "bash", "-c", shell) as (pid, screen):
        text = screen.read_to_end()
        assert exit_code(pid) == 0
    assert text.count("end\r\n") == 2
    assert text.endswith("code 0\r\n")


def test_ctrl_z_stops_all_ranks_and_fg_continues_them(launch: Launch) -> None:
    script = launch.script("""
        import os, time
        print("ready", os.environ["RANK"])
        for _ in range(40):
            time.sleep(0.05)
        print("done")
    """)
    shell = f"set -m; {' '.join(COMMAND)} -n 2 {script}; echo stopped; read line; fg > /dev/null; echo code $?"
    with at_terminal(launch, "bash", "-c", shell) as (pid, screen):
        screen.expect("ready 0")
        screen.expect("ready 1")
        screen.type("\x1a")
        screen.expect("stopped")
        ranks = [process for process in launch.processes() if _variable(process, "RANK")]
        assert len(ranks) == 2
        wait_until(lambda: all(_state(process) == "T" for process in ranks), "both ranks have stopped")
        screen.type("\n")
        text = screen.read_to_end()
        assert exit_code(pid) == 0
    assert text.count("done\r\n") == 2
    assert text.endswith("code 0\r\n")


def _variable(process: int, name: str) -> bool:
    return any(
        line.startswith(f"{name}=".encode()) for line in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    )


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
