"""`jzero doctor`: what it finds, and what it says is not available."""

import json
import os
import re

import jax
import pytest

import jzero
from jzero.cli import doctor
from jzero.cli.disk_report import examine_disk
from jzero.machines import topologies
from tests import pages
from tests.cli_runs import data_of, folder, run, text_of  # noqa: F401  # fixtures


def doubled(function):
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def test_doctor_ends_with_1_if_a_reduction_is_wrong(run, monkeypatch):
    monkeypatch.setattr(jax.lax, "psum_scatter", doubled(jax.lax.psum_scatter))
    some = {name: doctor.CHECKS[name] for name in ("collectives", "train step", "donation")}
    monkeypatch.setattr(doctor, "CHECKS", some)
    result = run("doctor --json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["collectives"]["status"] == "failed"
    assert "reduce-scatter over 8 devices" in checks["collectives"]["detail"]
    assert checks["train step"]["status"] == "failed"
    assert "deviates" in checks["train step"]["detail"]
    assert checks["donation"]["status"] == "ok", "the others go on"


def check_of(name):
    return doctor._run(name, lambda: doctor.CHECKS[name](jzero.make_mesh()))


def test_doctor_finds_lost_donation(monkeypatch):
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda fn, donate_argnums=None: jit(fn))
    found = check_of("donation")
    assert found.status == "failed"
    assert re.match(r"0 of \d+ donated bytes per device are reused, and the argument still exists", found.detail)


def test_doctor_finds_host_memory_that_does_not_keep_what_it_is_given(monkeypatch):
    device_put = jax.device_put
    flaw = lambda x, to: device_put(x * 2 if to.memory_kind == "pinned_host" else x, to)
    monkeypatch.setattr(jax, "device_put", flaw)
    assert check_of("host memory").status == "failed"
    stays = lambda x, to: device_put(x, to.with_memory_kind("device"))
    monkeypatch.setattr(jax, "device_put", stays)
    assert "is in device" in check_of("host memory").detail


def test_doctor_says_what_is_not_available(monkeypatch):
    alone = jzero.make_mesh(devices=jax.devices()[:1])
    check_all = lambda: [doctor._run(name, lambda check=check: check(alone)) for name, check in doctor.CHECKS.items()]
    with pytest.warns(UserWarning, match="one device"):
        found = check_all()
    assert [check.status for check in found] == ["not available", *["ok"] * 5]
    assert "nothing is partitioned" in found[-1].detail
    monkeypatch.setattr(doctor, "HOST", "a_memory")
    without = check_of("host memory")
    assert (without.status, "pinned_host" in without.detail) == ("not available", True)


def test_doctor_goes_on_where_there_are_no_devices(run, monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend")

    monkeypatch.setattr(jax, "devices", fail)
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"devices +failed +RuntimeError: Unable to initialize", result.stdout)


def test_doctor_names_missing_compilers(monkeypatch, run):
    monkeypatch.setattr(topologies, "_is_installed", lambda package: False)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(doctor, "CHECKS", {})
    text = text_of(run("doctor"))
    assert "pip install 'jzero[gpu]'" in text
    assert "pip install 'jzero[tpu]'" in text
    monkeypatch.setenv("TPU_LIBRARY_PATH", "libtpu.so")
    assert data_of(run("doctor --json"))["compilers"]["tpu"] is None


def test_doctor_measures_a_disk(run, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", {})
    found = data_of(run(f"doctor --disk {tmp_path} --disk-bytes 3e6 --json"))["disk"]
    assert found["folder"] == str(tmp_path)
    assert found["free_bytes"] > 3e6
    rates = found["rates"]
    assert rates["num_bytes"] == 1_500_000 // 4096 * 4096
    assert min(rates["read"], rates["write"], rates["duplex"]) > 0
    # 12 bytes of fp32 master, mean and variance travel in each direction.
    assert found["seconds_per_billion"] == pytest.approx(12e9 / rates["duplex"])
    assert os.listdir(tmp_path) == []
    text = text_of(run(f"doctor --disk {tmp_path} --disk-bytes 3e6"))
    assert "O_TMPFILE" in text
    assert "O_DIRECT" in text
    ((_, title, shown),) = (block for block in pages.blocks("guides/command_line.md") if block[0] == "text")
    assert title == pages.EXAMPLE
    printed = re.sub(rf"{tmp_path} \(\S+\)", "/local/scratch (ext4)", text[text.index("\ndisk\n") :])
    shown, printed = (re.sub("  file system .*\n", "", x) for x in (shown, printed))  # others where it lacks something
    pages.check_output("command_line.md", shown, printed, is_example=True)


def test_doctor_says_what_a_file_system_lacks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    (line,) = (text for name, text in examine_disk(str(tmp_path), 10**6).rows() if name == "file system")
    assert re.match(r"no O_DIRECT \(Invalid argument\): each record", line)


def test_doctor_does_not_measure_what_is_no_disk(run, tmp_path):
    missing = run(f"doctor --disk {tmp_path}/missing")
    assert missing.exit_code == 2
    assert "`--disk` must be a folder" in missing.stderr
    full = run(f"doctor --disk {tmp_path} --disk-bytes 1.024e15")
    assert full.exit_code == 2
    assert "cannot hold another 512,000,000,000,000 bytes" in full.stderr.replace("\n", " ")
