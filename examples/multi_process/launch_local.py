"""Starts several processes of a training script on this machine, each with its own virtual CPU devices.

    python examples/multi_process/launch_local.py
    python examples/multi_process/launch_local.py --processes 4 --devices 2 -- --steps 50 --stage 2
    python examples/multi_process/launch_local.py --script my_train.py -- --option of_my_script

Use it to try out a cluster's program. The processes find each other by the environment variables
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; `start_process` in train.py reads them. The launcher
prints the process number before each line of output. If one process fails, the launcher ends the others, and exits
with its status. It passes Ctrl-C and SIGTERM on to all processes; a second signal kills them.
"""

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

TRAIN = pathlib.Path(__file__).with_name("train.py")
POLL_SECONDS = 0.05
PRINTING = threading.Lock()
THREADS = {"PJRT_NPROC": "32"}  # for two steps at once on the virtual devices; see ../cpu_devices.py

Process = subprocess.Popen[str]


def main() -> None:
    """Launches, waits, and exits with the status of the processes."""
    args = parse_args()
    signals: list[int] = []  # received signals; `wait` handles them one by one
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    if sys.stderr.isatty():  # it takes seconds until they say something
        print(f"starting {args.processes} processes of {args.script.name}", file=sys.stderr, flush=True)
    processes = start([sys.executable, str(args.script), *args.args], count=args.processes, devices=args.devices)
    printers = [threading.Thread(target=print_lines, args=pair) for pair in enumerate(processes)]
    for printer in printers:
        printer.start()
    status = wait(processes, signals, grace_seconds=args.grace_seconds)
    for printer in printers:
        printer.join()
    sys.exit(status if status >= 0 else 128 - status)  # shells report a signal as 128 + its number


def start(command: list[str], *, count: int, devices: int) -> list[Process]:
    """Starts the processes, and returns them."""
    common = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
        "PYTHONUNBUFFERED": "1",
    }
    return [
        subprocess.Popen(
            command,
            env=THREADS | os.environ | common | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # otherwise the terminal would send Ctrl-C to them, too
        )
        for index in range(count)
    ]


def wait(processes: list[Process], signals: list[int], *, grace_seconds: float) -> int:
    """Waits until all processes have ended; returns the exit status of the first that failed, or 0."""
    status, passed_on, deadline = 0, 0, float("inf")
    while running := [process for process in processes if process.poll() is None]:
        failed = [process.returncode for process in processes if process.returncode]
        if failed and not status:
            status, deadline = failed[0], time.monotonic() + grace_seconds
            if not signals:  # otherwise they are already ending
                send(running, signal.SIGTERM)
        if len(signals) > passed_on:
            send(running, signals[0] if passed_on == 0 else signal.SIGKILL)
            passed_on += 1
        if time.monotonic() > deadline:
            send(running, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return status or next((process.returncode for process in processes if process.returncode), 0)


def send(processes: list[Process], number: int) -> None:
    """Sends a signal to processes."""
    for process in processes:
        process.send_signal(number)


def print_lines(index: int, process: Process) -> None:
    """Prints the output of a process, line by line."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            with PRINTING:  # `print` writes a line and its newline separately
                print(f"[{index}] {line.rstrip()}", flush=True)


def free_port() -> int:
    """Returns a port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def parse_args() -> argparse.Namespace:
    """Reads the command line; arguments after `--` are for the script."""
    parser = argparse.ArgumentParser(
        description="Start several processes of a training script on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2, help="how many")
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices of each process")
    parser.add_argument("--script", type=pathlib.Path, default=TRAIN, help="the program that they run")
    parser.add_argument("--grace-seconds", type=float, default=30, help="from the first failure to SIGKILL")
    parser.add_argument("args", nargs="*", help="arguments of the script, after --")
    args = parser.parse_args()
    if not args.script.is_file():
        parser.error(f"--script: there is no file {args.script}")
    return args


if __name__ == "__main__":
    main()
