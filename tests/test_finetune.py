"""The road from a published folder to a tuned one, as a user goes it: `examples/llm/finetune.py`."""

import dataclasses
import json
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import generate
import jzero
import training
import vocabulary
from tests import finetune_run, hf_models
from tests.byte_tokenizer import NUM_TOKENS, ByteTokenizer, tokenizer_of_transformers
from tests.example_runs import ROOT, environment

STEPS = 30


def options(tmp_path, *more, layers=2):
    """Writes a model and chats, if they are not there; returns the options that they are."""
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    if not data.exists():
        if not model.exists():
            hf_models.write_folder(model, "llama", vocab_size=NUM_TOKENS, num_hidden_layers=layers)
        sums = [(x % 7, x % 5) for x in range(200)]
        chats = [[("user", f"{a}+{b}"), ("assistant", f"is {a + b}.")] for a, b in sums]
        named = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
        data.write_text("\n".join(map(json.dumps, named)))
    options = f"--model={model} --data={data} --seq=32 --batch=8 --steps={STEPS} --lr=2e-2 --eval-every={STEPS}"
    return [*options.split(), "--precision=fp32", "--persistence-threshold=100", *map(str, more)]


def logged(path):
    """Returns the loss of each step, and the last one of held-out data."""
    lines = list(map(json.loads, path.read_text().splitlines()))
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return losses, [line["held_out"] for line in lines if "held_out" in line][-1]


def tensors_of(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def test_adapters_on_integers_learn_and_are_merged(tmp_path, capsys):
    out, log = tmp_path / "tuned", tmp_path / "log.jsonl"
    adapters = ("--quantize=int8", "--lora-rank=8", "--lora-modules=q|up", "--steps=10", "--eval-every=10")
    finetune_run.main(*options(tmp_path, *adapters, f"--log={log}", f"--out={out}", "--merge", layers=1))
    output = capsys.readouterr().out
    assert re.search(r"^200 examples .* skipped; \d+ rows of 33 tokens, \d+% full.*; 10 examples held out", output)
    assert re.search(r"^layers/up/kernel .*int8", output, re.MULTILINE)
    assert "warning: " not in output
    assert "stores nothing" not in output
    losses, held_out = logged(log)
    assert len(losses) == 10
    assert losses[10] < losses[1] - 1
    assert held_out < losses[1] - 1
    assert "added to their kernels as the plan stores these; all else is copied from" in output
    published, merged = (tensors_of(folder) for folder in (tmp_path / "model", out))
    assert published.keys() == merged.keys()
    same = {name for name, x in published.items() if x.tobytes() == merged[name].tobytes()}
    adapted = {name for name in published if "q_proj" in name or "up_proj" in name}
    assert same == published.keys() - adapted, "what has no adapters, to the byte"
    assert jzero.hf.read_config(out) == jzero.hf.read_config(tmp_path / "model")


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been_killed(tmp_path):
    saving = ("--quantize=int8", "--save-every=5", "--steps=40", "--eval-every=40")

    def start(name):
        folders = (f"--checkpoints={tmp_path / name}", f"--out={tmp_path / name}_out")
        command = [sys.executable, "-m", "tests.finetune_run", *options(tmp_path, *saving, *folders, layers=1)]
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)

    whole = start("whole")
    whole.communicate(timeout=300)
    assert whole.returncode == 0
    killed = start("killed")
    while not (tmp_path / "killed" / "10").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate(timeout=300)
    assert killed.returncode == -9, "not at its end"
    again = start("killed")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0
    assert re.search(r"resuming from step (10|15|20|25|30|35)\n", output)
    files = sorted(file.name for file in (tmp_path / "whole_out").glob("*.safetensors"))
    assert files
    for file in files:
        first, second = (load_file(tmp_path / f"{name}_out" / file) for name in ("whole", "killed"))
        assert first.keys() == second.keys()
        jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by PEFT, of transformers
def test_transformers_and_peft_continue_as_generate_does(tmp_path):
    """With a tokenizer of theirs, from its folder to theirs."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    finetune_run.main(*options(tmp_path, "--steps=1"))  # writes the model and the chats
    model = tmp_path / "model"
    tokenizer_of_transformers().save_pretrained(model)
    tokenizer = finetune_run.finetune.load_tokenizer(model)
    shared = ("--lora-modules=q|k|up", f"--checkpoints={tmp_path / 'run'}")
    for more in ((f"--out={tmp_path / 'tuned'}", "--merge"), (f"--out={tmp_path / 'adapter'}",)):
        finetune_run.finetune.finetune(finetune_run.finetune.parse_args(options(tmp_path, *shared, *more)), tokenizer)

    prompts = ("3+4", "66+1", "0+0")
    asked = [f"--prompt={prompt}" for prompt in prompts] + ["--num-tokens=8", "--dtype=float32"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = {
        f"--model={model} --adapter={tmp_path / 'adapter'}": peft.PeftModel.from_pretrained(
            theirs, tmp_path / "adapter"
        ),
        f"--model={tmp_path / 'tuned'}": transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"),
    }
    for folders, other in theirs.items():
        answers = generate.complete(generate.parse_args([*folders.split(), *asked]), tokenizer)
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.tensor([generate.encode(tokenizer, prompt, raw=False)])
            how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 0}
            new = other.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **how)
            assert tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True) == answer


@pytest.mark.slow
def test_two_processes_end_as_one(tmp_path):
    asked = ("--quantize=int8", "--merge", "--sample=3+4", "--sample-tokens=8")
    launcher = "examples/multi_process/launch_local.py --processes 2 --devices 4 --script tests/finetune_run.py --"
    commands = {1: ["-m", "tests.finetune_run"], 2: launcher.split()}
    samples = []
    for count, script in commands.items():
        folders = (f"--checkpoints={tmp_path / f'run{count}'}", f"--out={tmp_path / f'out{count}'}")
        command = [sys.executable, *script, *options(tmp_path, *asked, *folders)]
        how = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "timeout": 500}
        ended = subprocess.run(command, check=False, **how)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        samples += re.findall(r"^(?:\[0\] )?sample: (.*)$", ended.stdout, re.MULTILINE)
    asked = f"--model={tmp_path / 'out1'} --prompt=3+4 --prompt=66+1 --num-tokens=8 --dtype=float32 --divide-by=2"
    answer, _ = generate.complete(generate.parse_args(asked.split()), ByteTokenizer())
    assert samples == [repr(answer)] * 2, "printed by the first process only"
    one, two = (load_file(tmp_path / f"out{count}" / "model.safetensors") for count in commands)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), one, two)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (
            "--lora-modules=query",
            "`modules` 'query' matches none of the projections q, k, v, o, gate, up, gate_up, down",
        ),
        ("--lora-rank=-1", "`rank` must be at least 1: got -1"),
        ("--lora-rank=0 --quantize=int8", "--quantize int8 stores what is not trained: it needs --lora-rank"),
        ("--out=.", "--out . exists: name a new folder"),
        ("--log=log.txt", "--log: must be FILE.csv, FILE.jsonl, wandb:PROJECT or mlflow:EXPERIMENT: got 'log.txt'"),
        ("--data=missing.jsonl", "argument --data: there is no file missing.jsonl"),
        ("--held-out=missing.jsonl", "argument --held-out: there is no file missing.jsonl"),
        ("--batch=9", "`batch_size` must be a multiple of the 8 parts"),
        ("--model=Qwen/Tiny-1B", "fetch its folder, `hf download Qwen/Tiny-1B --local-dir Tiny-1B`, and pass that"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(bad, says, tmp_path, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        finetune_run.main(*options(tmp_path), *bad.split())
    assert says in str(error.value) + capsys.readouterr().err


def test_what_an_option_does_not_do_is_said(tmp_path, capsys, monkeypatch):
    """A line of data fills no step; a model below the threshold has nothing to round; a default is said by `--help`."""
    monkeypatch.setattr(finetune_run.finetune, "train", lambda state, *_, **__: state)  # it is said before
    given, line = options(tmp_path, layers=1), tmp_path / "one.jsonl"
    line.write_text('{"prompt": "1+1", "completion": "2"}')
    finetune_run.main(*given, f"--data={line}", "--quantize=int8", "--persistence-threshold=100000")
    output = capsys.readouterr().out
    assert "warning: 1 of the 8 rows of a step have data" in output
    assert "--quantize int8 stores nothing as int8: parameters of up to 100000 elements are whole" in output
    with pytest.raises(SystemExit):
        finetune_run.finetune.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens of a row (default: 1024)" in text
    assert "(default: None)" not in text


def test_a_run_that_resumes_keeps_its_options(tmp_path, capsys, monkeypatch):
    folder, short = tmp_path / "run", ("--steps=1", "--eval-every=9")
    monkeypatch.setattr(finetune_run.finetune, "make_look", lambda *_: lambda state: {})
    with monkeypatch.context() as patch:  # what is saved need not be trained
        patch.setattr(finetune_run.finetune, "make_step", lambda *_: lambda state, batch: (state, {"loss": 0.0}))
        finetune_run.main(*options(tmp_path, *short, "--lora-rank=3", f"--checkpoints={folder}", layers=1))
    saved = jzero.CheckpointManager(folder).restore_extra()["kept"]
    for option in ("--lora-rank 4", "--lora-rank 0", "--lora-alpha 3.0", "--lora-modules q|up", "--seq 16", "--seed 7"):
        flag, value = option.split()
        others = () if flag == "--lora-rank" else ("--lora-rank=3",)
        given = options(tmp_path, *short, *others, f"{flag}={value}", f"--checkpoints={folder}")
        with pytest.raises(SystemExit, match=rf"^{re.escape(option)}: the run in --checkpoints .*/run has {flag} "):
            training.check_kept(saved, finetune_run.finetune.parse_args(given))
    with pytest.raises(SystemExit, match=r"^--seed 7: "):
        finetune_run.main(*given)
    more = ("--steps=2", "--lora-rank=3", "--lr=1e-3", "--quantize=int8", f"--checkpoints={folder}")
    finetune_run.main(*options(tmp_path, *short, *more))
    assert "resuming from step 1" in capsys.readouterr().out


def test_a_folder_of_adapters_is_no_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit):
        generate.parse_args([f"--model={tmp_path}", "--prompt=a"])
    assert (
        "It has adapters alone: pass their model's folder here, and this one as `--adapter`" in capsys.readouterr().err
    )


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path, capsys):
    hf_models.write_folder(tmp_path / "small", "llama", vocab_size=100)
    given = [*options(tmp_path), f"--model={tmp_path / 'small'}"]
    with pytest.raises(SystemExit, match=r"259 tokens, .* 100 rows"):
        finetune_run.main(*given)
    with pytest.raises(SystemExit):
        finetune_run.main(*given, "--resize-vocab")  # beside adapters
    assert "pass --lora-rank 0" in capsys.readouterr().err


def rows_of(folder):
    """Returns embedding and head by the index of a folder."""
    files = json.loads((folder / vocabulary.INDEX).read_text())["weight_map"]
    return {name: load_file(folder / files[name])[name] for name in vocabulary.ROWS}


def test_new_tokens_begin_as_the_mean_of_the_published_rows(tmp_path):
    config = hf_models.write_folder(tmp_path, "llama", vocab_size=100)
    published, others = rows_of(tmp_path), {file.name for file in tmp_path.iterdir()}
    with vocabulary.with_rows(tmp_path, 103) as folder:
        assert jzero.hf.read_config(folder) == dataclasses.replace(config, vocab_size=103)
        assert {file.name for file in folder.iterdir()} == others | {vocabulary.NEW_FILE}
        for name, x in rows_of(folder).items():
            np.testing.assert_array_equal(x[:100], published[name])
            np.testing.assert_allclose(x[100:], np.tile(sum(published[name].astype(float)) / 100, (3, 1)), atol=1e-7)
    with vocabulary.with_rows(tmp_path, 100) as folder:
        assert folder == tmp_path


@pytest.mark.slow
def test_a_model_with_more_rows_trains_and_is_written(tmp_path):
    given = [*options(tmp_path), "--resize-vocab", "--lora-rank=0", "--steps=2", f"--out={tmp_path / 'tuned'}"]
    small = tmp_path / "small"
    hf_models.write_folder(small, "llama", vocab_size=100)
    finetune_run.main(*given, f"--model={small}")
    written = tensors_of(tmp_path / "tuned")
    assert {written[name].shape[0] for name in vocabulary.ROWS} == {NUM_TOKENS}
    assert jzero.hf.read_config(tmp_path / "tuned").vocab_size == NUM_TOKENS


@pytest.mark.slow
def test_experts_on_devices_of_their_own_learn_as_all_on_each(tmp_path, capsys):
    """With adapters, some of them on experts."""
    hf_models.write_folder(tmp_path / "model", "mixtral", vocab_size=NUM_TOKENS, num_local_experts=4)
    found = []
    for count in (1, 2):
        log = tmp_path / f"log{count}.jsonl"
        how = (f"--experts={count}", f"--log={log}", "--lora-rank=4", "--steps=3", "--sample=1+1")
        finetune_run.main(*options(tmp_path, *how, "--eval-every=3", "--accumulate-steps=1"))
        found.append(logged(log))
        assert ("over experts" in capsys.readouterr().out) == (count > 1)
    (losses, held_out), (apart, held_out_apart) = found
    assert list(apart.values()) == pytest.approx(list(losses.values()), rel=1e-4)
    assert held_out_apart == pytest.approx(held_out, rel=1e-4)
