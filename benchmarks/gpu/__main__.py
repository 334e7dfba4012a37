"""All that one or several real GPUs can tell in ten minutes, as one report: `python -m benchmarks.gpu`.

* machine: what it is, and the checks of `jzero doctor` on it;
* rates: what products, memory and links reach, beside the vendor's peaks;
* steps: time and peak memory of jzero at each stage against plain `jax.jit` and GSPMD* (`strong` of
  `benchmarks.families`), modelled and measured time, estimated, compiled and allocated memory, departures of the real
  executable from the plan;
* offload: steps with their state on the host, against a raw copy of the same bytes.

Each part has a process of its own and a share of the time that is left, the most telling part first. What fails, does
not fit or is out of time is in the report, and the others go on. The report is `benchmarks/results/DATE_gpu.md`, with
its figures as lines of JSON beside it; it is written anew after each part. Models and sizes suit the memory of the
devices (`--models` chooses; CUDA_VISIBLE_DEVICES chooses devices). `--small` tries everything out on any machine, at
sizes whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks.gpu.job import add_line, figures_of
from benchmarks.gpu.report import report

RESULTS = pathlib.Path(__file__).parents[1] / "results"
ROOT = pathlib.Path(__file__).parents[2]
# The most of the time that is left. The most telling parts come first: if compilation is slow, the others are left out.
MOST = {"machine": 0.15, "rates": 0.1, "offload": 0.4, "steps": 0.4}
LEAST = 60  # seconds of a part, if there are as many
STARTING = 15  # seconds until a part begins: to import jax and to find the devices


def run_part(part: str, seconds: float, lines: pathlib.Path, options: argparse.Namespace) -> None:
    """Runs a part in a process, ends it when its time is up, and tells how it ended unless it ended well."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", part, "--lines", str(lines)]
    command += [f"--seconds={max(seconds - STARTING, seconds / 2)}", *["--small"] * options.small]
    began, figures = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as log:
        command += ["--cache", cache, "--models", *options.models]
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if code := child.wait(timeout=seconds):
                figures["failed"] = f"ended with {code}"
        except subprocess.TimeoutExpired:
            figures["failed"] = f"ended after {seconds:.0f} s, its share of the time"
        finally:  # also if the user interrupts
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        if figures:
            figures["log"] = log.read()[-1500:].strip()
    add_line(lines, part, "", {"seconds": time.monotonic() - began, **figures})


def git(*arguments: str) -> str:
    """Returns what git says, or nothing."""
    result = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def run_parts(options: argparse.Namespace, out: pathlib.Path, lines: pathlib.Path) -> None:
    """Runs the parts, and writes the report after each."""
    deadline = time.monotonic() + 60 * options.minutes - STARTING
    parts, done = ["machine"], 0
    while done < len(parts):
        remaining, part = max(deadline - time.monotonic(), 0), parts[done]
        most = 1 if done == len(parts) - 1 and done else MOST[part.partition("/")[0]]
        seconds = min(remaining, max(LEAST, remaining * most))
        print(f"{part}: up to {seconds:.0f} of {remaining:.0f} s", flush=True)
        if seconds < LEAST / 2:
            add_line(lines, part, "", {"skipped": "no time was left"})
        else:
            run_part(part, seconds, lines, options)
        figures = figures_of(lines)
        if not done:
            facts = figures["machine"].get("facts", {})
            if options.default_out and facts.get("platform", "gpu") != "gpu":
                sys.exit(f"No GPU here, but {facts['count']} x {facts['kind']}: give --out FILE for a trial.")
            parts += [x for x in figures["machine"].get("parts", {}).get("names", []) if is_selected(x, options.only)]
        out.write_text(report(figures))
        done += 1


def is_selected(part: str, only: list[str]) -> bool:
    """Returns whether the user asked for a part."""
    return not only or any(x in part for x in only)


def main() -> None:
    """Runs all parts that suit this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="the report; benchmarks/results/DATE_gpu.md by default")
    parser.add_argument("--minutes", type=float, default=10, help="time for everything")
    parser.add_argument("--small", action="store_true", help="try everything out at the least size")
    parser.add_argument("--models", nargs="*", default=[], help="of benchmarks.families, in place of those that suit")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of parts, such as rates, steps/llama_1b")
    options = parser.parse_args()
    options.default_out = options.out is None
    today = datetime.datetime.now().astimezone()
    out = options.out or RESULTS / f"{today.date()}_gpu.md"
    lines = out.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    commit = git("rev-parse", "--short=12", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    facts = {"command": command, "commit": commit, "date": today.isoformat(timespec="minutes")}
    add_line(lines, "run", "", facts)
    run_parts(options, out, lines)
    print(f"{out} and {lines.name}")


if __name__ == "__main__":
    main()
