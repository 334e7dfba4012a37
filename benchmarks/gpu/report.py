"""The report of the GPU pack: Markdown from the figures of its parts."""

from __future__ import annotations

from benchmarks.tables import GB, MIB, MS, Column, Figures, fixed, number, plan, quotient, short, span, table

Part = dict[str, Figures]

LABELS = {"plain": "plain jit", "strong": "GSPMD*", "jzero": "jzero", "keeping": "jzero, keeping"}  # in this order

LEGEND = """
* GSPMD*: `jax.jit` with specs for parameters and optimizer state, one constraint on the activations of each block, and
  the model's own recomputation. Plain jit: everything but the batch whole on each device. Keeping: jzero with
  `remat="as_written"` and `reshard_after_forward=False`, which keeps in memory what GSPMD* keeps.
* All train by AdamW in bf16 with fp32 masters, from the same parameters on the same batch. Steps run several in a row,
  then one waits for the last; programs of one stage, and plain jit, take turns. A ratio is the median of the ratios of
  one turn. Spread: of eight in ten turns, of all if they are fewer than ten. "Alone": not all fit side by side, so they
  ran one after the other.
* Peaks are of one device. Compiled: what the compiler says. Allocated: the most that the allocator had given out after
  two steps; with ≤ it was no higher than before them. Estimated: `estimate_step_memory`, from the trace.
* Modelled: the compiled schedule at the vendor's peak rates, as `jzero.analyze` tells it, or at those measured here.
  Reckoned: the same from the trace.
* Plan: whether `report.verify()` finds that the executable that ran keeps to it."""


def report(by_part: dict[str, Part]) -> str:
    """Returns the report."""
    run, facts = by_part.get("run", {}).get("", {}), by_part.get("machine", {}).get("facts", {})
    title = f"# jzero on {facts.get('count')} × {facts.get('kind')}, {run.get('date', '')[:10]}"
    text = [title, "", f"`{run.get('command')}`, commit {run.get('commit')}."]
    if facts.get("platform") == "cpu":
        text[-1] += " A trial on CPUs: no figure here says anything about a GPU."
    text += [
        *troubles(by_part),
        *summary(by_part),
        *machine(by_part.get("machine", {})),
        *rates(by_part.get("rates", {})),
    ]
    for name, programs in trained_models(by_part).items():
        text += steps(name, programs)
    text += [*offload(by_part.get("offload", {})), "", "## How to read this", LEGEND, "", times(by_part)]
    return "\n".join(text) + "\n"


def trained_models(by_part: dict[str, Part]) -> dict[str, Part]:
    """Returns the compiled programs of each model on so many devices, from the parts for its stages."""
    models: dict[str, Part] = {}
    for part, programs in by_part.items():
        if part.startswith("steps/"):
            _, name, count, _ = part.split("/")
            model = models.setdefault(f"{name} on {count} device{'s' * (count != '1')}", {})
            for key, x in programs.items():
                if "peak" in x:
                    model.setdefault(key, x)  # plain jit is compared with two stages
    return models


def troubles(by_part: dict[str, Part]) -> list[str]:
    """Returns what failed or departed from the plan, and then what was skipped."""
    failed, skipped = [], {}
    for part, programs in by_part.items():
        for name, x in programs.items():
            label = f"{part}, {name}" if name else part
            if x.get("failed") or x.get("status") == "failed":
                failed.append(f"* **{label} failed**: {' '.join(str(x.get('failed', x.get('detail'))).split())}")
                failed += ["", "```text", x["log"], "```", ""] if x.get("log") else []
            failed += [f"* **{label} departs from the plan**: {y}" for y in x.get("violations") or []]
            if x.get("skipped"):
                skipped.setdefault(x["skipped"], []).append(label)
    text = [*failed, *(f"* Skipped, as {why}: {'; '.join(labels)}." for why, labels in skipped.items())]
    return ["", "## Failed or skipped", "", *(text or ["Nothing."])]


def summary(by_part: dict[str, Part]) -> list[str]:
    """Returns the few figures to look at first."""
    text, models = [], trained_models(by_part)
    for model, programs in models.items():
        compared = []
        for name, x in programs.items():
            if "of_strong" in x:
                peak = x["peak"] / programs[f"strong {name[-1]}"]["peak"]
                compared.append(f"{name_of(name)} {x['of_strong']:.2f} of its step at {peak:.2f} of its peak")
        text += [f"* {model}, against GSPMD*: {'; '.join(compared)}."] if compared else []
    trained = [x for programs in models.values() for x in programs.values()]
    parts = {
        "the modelled step takes, at the vendor's peaks": ("modelled", "step"),
        "the modelled step takes, at measured rates": ("modelled_at_rates", "step"),
        "the step reckoned from the trace takes": ("reckoned_seconds", "step"),
        "the estimated peak takes": ("reckoned", "peak"),
        "the compiled peak takes": ("peak", "allocated"),
    }
    reached = [x["per_second"] / x["vendor"] for x in by_part.get("rates", {}).values() if x.get("vendor")]
    text += [f"* Products, memory and links reach {span(reached)} of the vendor's peaks."] if reached else []
    of = {"step": "measured", "peak": "compiled", "allocated": "allocated"}
    for title, (a, b) in parts.items():
        ratios = [x[a] / x[b] for x in trained if x.get(a) and x.get(b) and not (b in x and x.get(f"{b}_at_most"))]
        text += (
            [f"* Of what was {of[b]} {title} {span(ratios)} ({len(ratios)} program{'s' * (len(ratios) > 1)})."]
            if ratios
            else []
        )
    for name, x in by_part.get("offload", {}).items():
        if "raw" in x:
            text.append(
                f"* Offload, {OFFLOADED[name]}: {x['of_none']:.2f} of the step without; it uses the link for at least "
                f"{x['raw'] / x['step']:.2f} of the step."
            )
    checked = [x for programs in by_part.values() for x in programs.values() if x.get("violations") is not None]
    text += [f"* {sum(not x['violations'] for x in checked)} of {len(checked)} executables keep to their plans."] * any(
        checked
    )
    return ["", "## In short", "", *(text or ["Nothing was measured."])]


def name_of(program: str) -> str:
    """Returns the label of a program."""
    engine, stage = program.split()
    return LABELS[engine] + ("" if engine == "plain" else f", stage {stage}")


def machine(part: Part) -> list[str]:
    """Returns what machine it was, and what `jzero doctor` said."""
    facts = part.get("facts", {})
    limit, host = facts.get("memory_limit"), facts.get("host_bytes", 0) / 2**30
    memory = f", {limit / 2**30:.1f} GiB of each for jax" if limit else ""
    text = ["", "## Machine", "", f"* {facts.get('count')} × {facts.get('kind')}{memory}"]
    text += [f"* {facts.get('cpus')} CPUs, {host:.0f} GiB, {facts.get('system')}"]
    text += ["* " + ", ".join(f"{name} {x}" for name, x in facts.get("versions", {}).items() if x)]
    text += ["* runtime: " + " ".join(str(facts.get("runtime")).split())]
    text += [f"* `{name}={x}`" for name, x in facts.get("settings", {}).items()]
    for key in ("gpus", "links"):
        text += ["", "```text", facts[key], "```"] if facts.get(key) else []
    checks = [x for name, x in part.items() if name.startswith("check: ")]
    text += ["", "Checks of `jzero doctor`:", ""] if checks else []
    return [*text, *(f"* {x['name']}: {x['status']}, {x['detail']}" for x in checks)]


RATES = {
    "bf16": ("products in bf16, Tflop/s", 1e12),
    "tf32": ("products in fp32, default precision, Tflop/s", 1e12),
    "f32": ("products in fp32, highest precision, Tflop/s", 1e12),
    "memory": ("memory read and written, GB/s", GB),
    "all-gather": ("sent in an all-gather, GB/s", GB),
    "reduce-scatter": ("sent in a reduce-scatter, GB/s", GB),
}


def rates(part: Part) -> list[str]:
    """Returns what the devices reach."""
    in_unit = lambda x, unit: {key: x.get(key) and x[key] / unit for key in ("per_second", "vendor")}
    rows = [(title, in_unit(part[name], unit)) for name, (title, unit) in RATES.items() if name in part]
    columns = [("measured", number("per_second")), ("vendor's peak", number("vendor"))]
    columns += [("part", quotient("per_second", "vendor"))]
    return ["", "## Rates of each device, all of them busy", *table(columns, rows)]


def spread(x: Figures) -> str:
    """Shows between what steps lie, and whether they ran alone."""
    return f"{short(x['low'] / MS)}-{short(x['high'] / MS)}{' alone' * x.get('alone', False)}" if "low" in x else ""


def allocated(x: Figures) -> str:
    """Shows the allocator's peak, or what it was at most."""
    return "≤ " * x.get("allocated_at_most", False) + number("allocated", MIB)(x)


STEPS: list[Column] = [
    ("step, ms", number("step", MS)),
    ("spread", spread),
    ("turns", fixed("turns", 0)),
    ("of plain", fixed("of_plain")),
    ("of GSPMD*", fixed("of_strong")),
    ("peak, MiB: compiled", number("peak", MIB)),
    ("allocated", allocated),
    ("compiled, of GSPMD*", quotient("peak", "strong_peak")),
    ("sent, MiB", number("sent", MIB)),
    ("loss", fixed("loss", 4)),
    ("plan", plan),
    ("compiled in, s", number("compile_seconds")),
]
MODELS: list[Column] = [
    ("step, ms: measured", number("step", MS)),
    ("modelled, vendor's peaks", number("modelled", MS)),
    ("part", quotient("modelled", "step")),
    ("reckoned, vendor's peaks", number("reckoned_seconds", MS)),
    ("part", quotient("reckoned_seconds", "step")),
    ("modelled, measured rates", number("modelled_at_rates", MS)),
    ("part", quotient("modelled_at_rates", "step")),
    ("communication exposed in that, %", number("exposed_at_rates", 0.01)),
    ("products, Tflop/s", lambda x: short(x["flops"] / x["step"] / 1e12) if x.get("flops") and x.get("step") else ""),
    ("peak, MiB: estimated", number("reckoned", MIB)),
    ("of compiled", quotient("reckoned", "peak")),
    ("of allocated", lambda x: "" if x.get("allocated_at_most") else quotient("reckoned", "allocated")(x)),
]


def steps(name: str, programs: Part) -> list[str]:
    """Returns the tables of one model."""
    order = list(LABELS)
    by_stage = lambda key: (key[-1] if not key.startswith("plain") else "", order.index(key.split()[0]))
    peer = lambda key: programs.get(f"strong {key[-1]}", {}).get("peak")
    rows = [(name_of(key), {**programs[key], "strong_peak": peer(key)}) for key in sorted(programs, key=by_stage)]
    text = ["", f"## {name}", *table(STEPS, rows)]
    counts = sorted({x["steps"] for x in programs.values() if "steps" in x})
    text += (
        [f"The losses are those after {counts[0]} steps; in bf16 they agree to about three digits."] if counts else []
    )
    return [*text, "", "Models against measurements:", *table(MODELS, rows)]


OFFLOADED = {
    "optimizer": '`optimizer="host"`',
    "parameters, too": '`optimizer="host", params="host"`',
    "in 64 MiB": '`optimizer="host"` in chunks of 64 MiB',
}
OFFLOAD: list[Column] = [
    ("step, ms", number("step", MS)),
    ("without offload", number("none", MS)),
    ("ratio", fixed("of_none")),
    ("on the host, MiB", number("host", MIB)),
    ("moved to a device, MiB", number("there", MIB)),
    ("and back", number("back", MIB)),
    ("raw copies of these, ms", number("raw", MS)),
    ("of the step", quotient("raw", "step")),
    ("longer than without, ms", lambda x: short((x["step"] - x["none"]) / MS)),
    ("peak, MiB: compiled", number("peak", MIB)),
    ("estimated", number("reckoned", MIB)),
    ("plan", plan),
]


def offload(part: Part) -> list[str]:
    """Returns the table of offload."""
    if not part:
        return []
    model = ", ".join(f"{key} {x}" for key, x in part.get("model", {}).items())
    copies = ", ".join(f"{direction} {short(x / GB)} GB/s" for direction, x in part.get("raw copy", {}).items())
    about = (
        f"A GPT ({model}) in bf16 at stage 3, in turns with the same training without offload. Bytes are those of one "
        "device, at least: the way of gradients to the host is not counted. Raw copies run between a device and pinned "
        "memory of its host, on all devices at once; in the table those to a device and back run one after the other, "
        f"while a step may use both ways at once. Their rates: {copies or 'not measured'}."
    )
    return [
        "",
        "## Offload",
        "",
        about,
        *table(OFFLOAD, [(OFFLOADED[name], x) for name, x in part.items() if "step" in x]),
    ]


def times(by_part: dict[str, Part]) -> str:
    """Returns how long each part took."""
    took = {part: x[""]["seconds"] for part, x in by_part.items() if "seconds" in x.get("", {})}
    each = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in took.items())
    return f"{sum(took.values()) / 60:.1f} minutes: {each}."
