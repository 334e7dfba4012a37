"""Eight CPU devices for every test; set before anything asks jax for its devices."""

import gc
import os
import pathlib
import shutil
import tempfile
import zlib

# XLA's CPU client runs devices on as many threads as there are cores or devices. With just one thread a device, two
# programs in flight can wait for each other for ever: after 40 s XLA ends the process (seen with jax 0.10, 2 cores).
os.environ["PJRT_NPROC"] = "32"

import jax
import pytest

# Tests compile much and run little. Not optimizing machine code saves a third of the suite's time; with jax up to 0.10
# plainer code for fusions saves a third of the rest, and one LLVM module per program an eighth of what is left. XLA's
# own passes, whose results tests look at, run in any case. `XLA_FLAGS= pytest` optimizes the code.
PLAIN_FUSIONS = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1" + PLAIN_FUSIONS
os.environ.setdefault("XLA_FLAGS", FLAGS)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

assert jax.device_count() == 8, jax.devices()


PROGRAMS = pytest.StashKey[pathlib.Path]()
MOST_BYTES = 2 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what XLA compiles in pytest's cache: another run of most files takes 40 % less time.

    Each process has a folder of its own, of links: jax would read files that another one is still writing.
    """
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return
    kept = config.cache.mkdir("programs")
    if sum(x.stat().st_size for x in kept.iterdir()) > MOST_BYTES:  # of many versions of the code
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(exist_ok=True)
    config.stash[PROGRAMS] = folder = pathlib.Path(tempfile.mkdtemp(prefix="programs-", dir=kept.parent))
    shutil.copytree(kept, folder, copy_function=os.link, dirs_exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # their path would be in each program's key
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Adds complete files to what is kept; a process that dies adds nothing."""
    folder = config.stash.get(PROGRAMS, None)
    if folder is None:
        return
    kept = config.cache.mkdir("programs")
    for x in folder.iterdir():
        if not (kept / x.name).exists():
            x.replace(kept / x.name)
    shutil.rmtree(folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="I/N", help="run share I (0 to N - 1) of N equal shares of the selected tests")


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_not_searched_for_garbage() -> None:
    """After some files jax's caches hold millions of objects, and one `gc.collect()` would take a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        chosen, shares = map(int, share.split("/"))
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % shares == chosen % shares]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
