"""What the command refuses in one line before it starts anything, and how it ends when nobody reads."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fa_a2a
from fa_a2a import cli, config, doctor
from fa_a2a.bench import launch, main, table
from fa_a2a.bench.timing import paired
from fa_a2a.cli import main as command
from fa_a2a.errors import ShapeError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def refusal(capsys, monkeypatch, tmp_path):
    """refusal(arguments): the one line of a command that must start no ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda *arguments: pytest.fail("ranks were started"))

    def run(*arguments):
        assert command([str(argument) for argument in arguments]) == 1
        line = capsys.readouterr().err
        assert line.startswith("fa-a2a: ") and line.count("\n") == 1
        return line

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seq-lens 101 --ranks 2", "101 tokens over 2 ranks; pad the sequence"),
        ("--seq-lens 96 --ranks 3", "8 heads over 3 ranks; use a number of ranks that divides the heads"),
        ("--heads 8,6 --ranks 2,4", "6 heads over 4 ranks"),
        ("--ranks 1", "one rank has nothing to exchange"),
        ("--ranks 2,33", "--ranks must be at most 32, which a group has at most, got 33"),
        ("--head-dim 12", "head_dim must be a multiple of 8, got 12"),
        ("--profile nonsense", "give a path, or one of ['h200x2', 'h200x4', 'paper']"),
        ("--out /dev/null/lines.jsonl", "--out cannot be written"),
        ("--out .", "--out must be a file"),
        ("--out lines.png", "need two files"),
        ("--plot x.nonsense", "--plot must end in one of"),
        ("--plot /dev/null/x.png", "--plot cannot be written"),
    ],
)
@pytest.mark.parametrize("layer", [[], ["--layer"]])
def test_sweep(refusal, options, message, layer):
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    assert message in refusal("sweep", "--device", "cpu", *options.split(), *layer)


@pytest.mark.parametrize("name", ["FA_A2A_TIMEOUT_S", "FA_A2A_COMPILE_TIMEOUT_S", "FA_A2A_ARENA_MIB"])
def test_environment(refusal, monkeypatch, name):
    monkeypatch.setenv(name, "soon")
    assert f"{name} must be a positive number, at most 1e+09, got 'soon'" in refusal("sweep", "--device", "cpu")


def test_sweep_adds_to_no_foreign_file(refusal, tmp_path):
    (tmp_path / "notes.txt").write_text("notes\n")
    assert "notes.txt:1: a results file has one JSON object a line" in refusal("sweep", "--out", "notes.txt")


def test_default_heads_that_do_not_divide_are_left_out_and_named_ones_refused():
    rest = {"seq_len": 64, "head_dim": 64, "batch": 1, "dtype": "float32", "kernel": "cpu", "rounds": 1, "profile": ""}
    rows = [main.Case(num_heads=heads, **rest) for heads in (24, 12)]
    found = main.rows_by_ranks(rows, [4, 8], chosen_heads=False)
    assert {ranks: [row.num_heads for row in mine] for ranks, mine in found.items()} == {4: [24, 12], 8: [24]}
    with pytest.raises(ShapeError, match="12 heads over 8 ranks"):
        main.rows_by_ranks(rows, [4, 8], chosen_heads=True)


def test_each_number_of_ranks_is_measured_once(monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", lambda body, ranks, *rest: ran.append((ranks, len(rest[1]))))
    monkeypatch.setattr(main, "show", lambda *arguments: None)
    assert command(["sweep", "--device", "cpu", "--ranks", "2,4,2", "--seq-lens", "64,64"]) == 0
    assert ran == [(2, 1), (4, 1)]
    assert capsys.readouterr().out.startswith("CPU processes: a check")


def test_sweep_on_cpus_shows_no_costs_and_no_predictions():
    line = {"device": "CPU", "world_size": 2, "seq_len": 64, "num_heads": 8, "kernel": "cpu", "bitwise_equal": True}
    shown = ["serial", "sender", "ready"]
    assert table.sweep_header("CPU").split() == ["P", "S", "H", "kernel", "FA", "us", *shown, "bitwise"]
    assert table.sweep_row(line).split() == ["2", "64", "8", "cpu", "-", "-", "-", "-", "equal"]
    assert "pred." in table.sweep_header("NVIDIA H200")


def test_one_round_has_no_interval():
    assert paired([3.0], [1.0]) == (2.0, None)
    cells = table.sweep_row({"cost_sender_us": 2.0, "cost_sender_ci_us": None, "device": "GPU"}).split()
    assert cells[12:14] == ["+2.0", "-"]


SWEEP = ROOT / "benchmarks/results/sweep_h200x2.jsonl"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("garbage", "it is not text"),
        ("lacking", "a line of kind 'sweep' has no usable date"),
        (".", "a results file must be a file, got the folder"),
        ("gone", "no such results file: gone"),
        (f"{SWEEP} --out x.nonsense", "--out must end in one of"),
        (f"{SWEEP} --out /dev/null/x.png", "--out cannot be written"),
        (f"{SWEEP} --out x.png --readme gone.md", "no such README: gone.md"),
        (f"{SWEEP} --out x.png --readme plain.md", "got none"),
        (f"{SWEEP} --out x.png --readme .", "a README must be a file"),
    ],
)
def test_plot(refusal, tmp_path, options, message):
    pytest.importorskip("matplotlib")
    (tmp_path / "garbage").write_bytes(bytes(range(256)))
    (tmp_path / "lacking").write_text('{"kind": "sweep", "device": "GPU"}\n')
    (tmp_path / "plain.md").write_text("no marker\n")
    assert message in refusal("plot", *options.split())
    assert not list(tmp_path.glob("x.*")), "nothing is drawn"


def test_compile(refusal, monkeypatch):
    assert "--num-sms must be at least 1, got 0" in refusal("compile", "--arch", "sm_90a", "--num-sms", 0)
    pytest.importorskip("cutlass")
    monkeypatch.setenv("FA_A2A_CACHE_DIR", "/dev/null/cache")
    assert "set FA_A2A_CACHE_DIR to a writable folder" in refusal("compile", "--arch", "sm_90a")


def test_compile_without_the_kernels(refusal, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fa4_a2a"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fa4_a2a", None)
    assert "pip install 'fa_a2a[kernels]'" in refusal("compile", "--arch", "sm_90a")


def test_nobody_reads_and_the_module_is_the_command():
    """The reader leaves before the first line; also: python -m fa_a2a."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "cute")])
    process = subprocess.Popen(
        [sys.executable, "-m", "fa_a2a", "doctor"],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_doctor_marks_what_is_wrong_in_the_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("FA_A2A_"):
            monkeypatch.delenv(name)
    assert not [line for line in doctor.report() if "WRONG" in line]
    for name, value in (("TIMEOUT_S", "-1"), ("DEBUG", "maybe"), ("REQUIRE", "cpu"), ("TIMEOUT", "5")):
        monkeypatch.setenv(f"FA_A2A_{name}", value)
    wrong = [line.split("=")[0].split(":")[0].strip() for line in doctor.report() if "WRONG" in line]
    assert wrong == ["FA_A2A_TIMEOUT_S", "FA_A2A_DEBUG", "FA_A2A_REQUIRE", "FA_A2A_TIMEOUT"]


def test_unknown_tier_is_an_error(monkeypatch):
    monkeypatch.setenv("FA_A2A_REQUIRE", "gpu,compile")
    assert config.required_tiers() == ["gpu", "compile"]
    monkeypatch.setenv("FA_A2A_REQUIRE", "gpus")
    with pytest.raises(config.ConfigurationError, match="among compile, gpu, multigpu, got 'gpus'"):
        config.required_tiers()


def test_initialize_has_nothing_to_start_on_cpus():
    assert fa_a2a.initialize(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert fa_a2a.initialize() is None


def test_options_and_their_checks_import_no_torch():
    program = "import sys, fa_a2a.cli, fa_a2a.bench.rank_process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


def test_a_graph_on_cpus(refusal):
    pytest.importorskip("diffusers")
    assert "a CUDA graph needs a GPU" in refusal("dit", "--device", "cpu", "--modes", "eager,graph")


def test_one_gpu_is_no_several(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(config.ConfigurationError, match="this measures several GPUs, and the machine has one"):
        main.rank_counts(None, "cuda")


def options_of(parser):
    return [a for a in parser._actions if a.help != argparse.SUPPRESS]


def test_every_command_and_every_option_says_what_it_is():
    (commands,) = (a.choices for a in options_of(cli._parser()) if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.items():
        assert parser.description.endswith("."), name
        silent = [a.dest for a in options_of(parser) if not a.help]
        assert not silent, (name, silent)
        for action in options_of(parser):  # a default is said, unless it is none
            assert (
                action.default in (None, False, 0.0, argparse.SUPPRESS)
                or isinstance(action.default, Path)
                or ("default" in action.help or ";" in action.help)
            ), (name, action.dest)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        command(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fa_a2a {fa_a2a.__version__}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--calls 3", "--calls must be at least 10, got 3"),
        ("--ranks 1", "one rank has nothing to exchange"),
        ("--ranks 0", "--ranks must be at least 2, got 0"),
        ("--ranks 99", "--ranks must be at most 32"),
        ("--delays-us -1", "--delays-us must be from 0"),
        ("--delays-us nan", "--delays-us must be from 0"),
        ("--traffic", "--traffic is about the links between GPUs"),
        ("--out .", "--out must be a file"),
    ],
)
def test_soak(refusal, options, message):
    assert message in refusal("soak", "--device", "cpu", *options.split())


NO_GPU = "torch sees none; fa-a2a audit tells"
LAYERS = "is for kernel fa4, head_dim 128 and batch 1"


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (False, "8", f"--emulate measures two GPUs, and {NO_GPU}"),
        (False, "8 --layer", NO_GPU),
        (False, "8 --device cuda", NO_GPU),
        (False, "8 --device cpu", "two ranks on two GPUs, and draws nothing; got --device cpu; leave it out"),
        (True, "8 --layer diffusers", "got --layer diffusers; leave it out"),
        (True, "8 --layer --head-dim 64", LAYERS),
        (True, "8 --layer --batch 2", LAYERS),
        (True, "16 --layer", "at most 8 ranks, got 16"),
        (True, "8 --plot x.png", "got --plot"),
        (True, "8 --ranks 4", "got --ranks 4; leave"),
        (True, "2", "--emulate takes 3 to 32 ranks, got 2; sweep measures 2"),
        (True, "33", "got 33"),
        (True, "8 --heads 12", "12 heads over 8 ranks"),
        (True, "8 --seq-lens 4609", "4609 tokens over 8 ranks"),
        (True, "8 --profile nonsense", "give a path, or one of"),
        (True, "8 --out .", "--out must be a file"),
    ],
)
def test_emulation(refusal, monkeypatch, gpus, options, message):
    """What is refused before a GPU is asked for anything; which kernel it runs is not asked here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(main.kernels, "problem", lambda *arguments: None)
    assert message in refusal("sweep", "--emulate", *options.split())
