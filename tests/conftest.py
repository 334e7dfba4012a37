"""Eight CPU devices for every test; set before anything asks jax for its devices."""

import gc
import itertools
import logging
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# XLA's CPU client runs devices on as many threads as there are cores or devices. With just one thread a device, two
# programs in flight can wait for each other for ever: after 40 s XLA ends the process (seen with jax 0.10, 2 cores).
os.environ["PJRT_NPROC"] = "32"

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("busy machines", deadline=None)
hypothesis.settings.load_profile("busy machines")

# Tests compile much and run little. Not optimizing machine code saves a third of the suite's time; with jax up to 0.10
# plainer code for fusions saves a third of the rest, and one LLVM module per program an eighth of what is left. XLA's
# own passes, whose results tests look at, run in any case. `XLA_FLAGS= pytest` optimizes the code.
PLAIN_FUSIONS = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1" + PLAIN_FUSIONS
os.environ.setdefault("XLA_FLAGS", FLAGS)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 1)  # of callers, which no test looks at: a seventh of lowering

assert jax.device_count() == 8, jax.devices()

from jzero.core.base import guard  # noqa: E402 (after jax is set up)

OWN, POOL = pytest.StashKey[Path](), pytest.StashKey[Path | None]()
POOL_BYTES = 2**30  # most that stays from run to run; the whole default suite takes a tenth


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what XLA compiles, in pytest's cache, too: a second run takes three quarters of the time of the first.

    Each process has a folder of its own: jax would read files that another is still writing.
    """
    config.stash[OWN] = Path(tempfile.mkdtemp(prefix="jzero-tests-"))
    cache = getattr(config, "cache", None)  # none with `-p no:cacheprovider`
    config.stash[POOL] = cache.mkdir("compiled") if cache else None
    jax.config.update("jax_compilation_cache_dir", str(config.stash[OWN]))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # else keys depend on the folder
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)


def exchange_compiled(config: pytest.Config) -> None:
    """Gives to other processes, and to the next run, what this one has compiled, and takes what they have."""
    own, pool = config.stash[OWN], config.stash[POOL]
    if pool is None:
        return
    mine, theirs = set(os.listdir(own)), {name for name in os.listdir(pool) if name.endswith("-cache")}
    for name in mine - theirs:
        partial = pool / f"{name}.{os.getpid()}"
        shutil.copyfile(own / name, partial)
        partial.replace(pool / name)
    for name in theirs - mine:
        shutil.copyfile(pool / name, own / name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    exchange_compiled(session.config)
    shutil.rmtree(session.config.stash[OWN], ignore_errors=True)
    if (pool := session.config.stash[POOL]) and not hasattr(session.config, "workerinput"):  # the last process to end
        newest = sorted(pool.iterdir(), key=lambda file: -file.stat().st_mtime)
        for file, total in zip(newest, itertools.accumulate(file.stat().st_size for file in newest), strict=True):
            if total > POOL_BYTES:
                file.unlink()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run share I (0 to N - 1) of N equal shares of the selected tests")


@pytest.fixture(scope="module", autouse=True)
def what_other_processes_compiled_is_found(pytestconfig: pytest.Config) -> None:
    exchange_compiled(pytestconfig)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_not_searched_for_garbage() -> None:
    """After some files jax's caches hold millions of objects, and one `gc.collect()` would take a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def examples_do_not_change_what_is_logged() -> Iterator[None]:
    """Some run in this process, and let jzero's log say what takes long."""
    yield
    logging.getLogger("jzero").setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def checks_do_not_fail() -> Iterator[Callable[[Exception], None]]:
    """What a user's step takes for unknown is an error in a test."""
    logs = guard.note_failure

    def fail(error: Exception) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "note_failure", fail)
        yield logs


@pytest.fixture
def checks_may_fail(checks_do_not_fail: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a user's step."""
    monkeypatch.setattr(guard, "note_failure", checks_do_not_fail)


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Python's own handler of SIGINT, which a program that a shell has put in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        chosen, shares = map(int, share.split("/"))
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == chosen % shares]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
