"""Which tests of the short run catch which faults: ``python -m tests.mutations --jobs 8 --workers 2``.

Each fault costs a short run at most, of about eleven minutes of a processor, and memory for each worker of about two
gigabytes. The status is 1 if a fault is missed, or if tests fail without one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.mutations.faults import FAULTS, Fault
from tests.mutations.running import ROOT, Outcome, place, pytest_command, try_fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Try faults, print what becomes of each, and return the status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="how many faults are tried at once")
    parser.add_argument("--workers", type=int, default=2, help="processes of each run of the tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="faults whose names have one of these")
    parser.add_argument("--tests", nargs="+", default=[], help="what to run instead of everything")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a run is said to hang")
    parser.add_argument("--list", action="store_true", help="print the faults and where they are, and try none")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not options.only or any(part in fault.name for part in options.only)]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:45} {place(fault).relative_to(ROOT)}: {fault.bug}")
        return 0
    command = pytest_command(options.workers, options.tests)
    missed: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tries: dict[object, Fault | None] = {
            pool.submit(try_fault, fault, command, options.limit, time.monotonic): fault for fault in (None, *chosen)
        }
        for future in as_completed(tries):  # type: ignore[arg-type]
            if not _report(tries[future], future.result()):
                missed.append(_name(tries[future]))
    print(f"{len(chosen) - len(set(missed) - {_name(None)})} of {len(chosen)} caught")
    print("".join(f"missed: {name}\n" for name in missed), end="")
    return 1 if missed else 0


def _name(fault: Fault | None) -> str:
    return "no fault" if fault is None else fault.name


def _report(fault: Fault | None, outcome: Outcome) -> bool:
    """Print what became of a fault; whether it is as it should be."""
    if fault is None and outcome.caught:
        print(outcome.output)
    what = "caught" if outcome.caught else "passes" if fault is None else "MISSED"
    print(f"{what:7} {_name(fault):45} {outcome.seconds:6.0f} s  {outcome.test}", flush=True)
    return outcome.caught == (fault is not None)


if __name__ == "__main__":
    sys.exit(main())
