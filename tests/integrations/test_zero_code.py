"""`torchtap run`: scripts that know nothing of torchtap behave as ever, and their runs hold what they did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.optional import need

import torchtap as tt
from torchtap.cli import main
from torchtap.errors import PlanError
from torchtap.integrations.inject import injected_path
from torchtap.integrations.zero_code.settings import Settings
from torchtap.plan.next_live import Pace
from torchtap.schedule import Moment

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "torchtap", "run"]


def start(
    *words: str | Path, folder: Path, expect: int = 0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **({**environment, "PYTHONPATH": inject()} if environment else {})},
    )
    assert done.returncode == expect, done.stderr
    return done


def inject() -> str:
    """What ``$(torchtap inject)`` gives."""
    return injected_path(os.environ.get("PYTHONPATH"))


def losses_of(text: str) -> dict[int, float]:
    words = [line.split() for line in text.splitlines() if line.startswith("loss ")]
    return {int(step): float(value) for _, step, value, *_ in words}


def check(
    folder: Path, *script: str | Path, site: str, evaluations: int = 0, beside_plain: bool = False
) -> tt.Run:
    """Run it recorded, and plain where asked: the same output; the losses that it prints are in the run."""
    recorded = start(*RUN, "--out", "run", "--every", "1", *script, folder=folder)
    if beside_plain:
        assert recorded.stdout == start(sys.executable, *script, folder=folder).stdout
    said = [line for line in recorded.stderr.splitlines() if line.startswith("torchtap:")]
    assert len(said) == 1
    assert "torchtap view run" in said[0]
    run = tt.open(folder / "run")
    losses = losses_of(recorded.stdout)
    series = run.series(":value.loss", "value")
    assert series.steps.tolist() == list(losses)
    assert series.values.tolist() == pytest.approx(list(losses.values()), rel=1e-5)
    assert len(run.series(site, "std", phase="train").steps) == len(losses)
    if evaluations:
        assert len(run.series(site, "std", phase="eval").steps) == evaluations
    return run


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpt_with_evaluation_accumulation_and_compile(tmp_path: Path, compiled: bool) -> None:
    script = [SCRIPTS / "gpt.py", "--steps", "6", *(["--compile"] if compiled else [])]
    run = check(tmp_path, *script, site="blocks.1.mlp:output", evaluations=2, beside_plain=True)
    assert run.series("blocks.0.qkv:output", "count", phase="train").values.tolist() == [2 * 4 * 8 * 48] * 6
    assert "blocks.0.qkv:update.weight" in run.sites()


def test_a_gan_is_one_run_with_both_models(tmp_path: Path) -> None:
    run = check(tmp_path, SCRIPTS / "gan.py", site="netG.main.0:output")
    assert len(run.series("netD.main.2:param_grad.weight", "l2").steps) == 5


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_classifier_whose_workers_leave_no_trace(tmp_path: Path, context: str) -> None:
    run = check(tmp_path, SCRIPTS / "classifier.py", context, site="0:output", evaluations=2)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert run.status == "closed"


def test_a_script_of_hugging_faces_trainer(tmp_path: Path) -> None:
    need("transformers.trainer")
    recorded = start(*RUN, "--out", "run", "--every", "1", SCRIPTS / "hf.py", "out", folder=tmp_path)
    assert len(losses_of(recorded.stdout)) == 4
    run = tt.open(tmp_path / "run")
    assert len(run.series("transformer.h.0:output", "std", phase="train").steps) == 4
    assert len(run.series("transformer.h.0:output", "std", phase="eval").steps) == 2


def test_a_script_of_lightnings(tmp_path: Path) -> None:
    need("lightning.pytorch")
    start(*RUN, "--out", "run", "--every", "1", SCRIPTS / "with_lightning.py", folder=tmp_path)
    run = tt.open(tmp_path / "run")
    assert len(run.series("net.0:output", "std", phase="train").steps) == 5


def test_two_processes_under_torchrun_are_one_run(tmp_path: Path) -> None:
    launcher = Path(sys.executable).parent / "torchrun"
    words = [launcher, "--standalone", "--nproc-per-node", "2", SCRIPTS / "two_ranks.py"]
    recorded = start(*RUN, "--out", "run", "--every", "1", *words, folder=tmp_path)
    assert len(losses_of(recorded.stdout)) == 4
    assert recorded.stderr.count("torchtap: ") == 1
    run = tt.open(tmp_path / "run")
    assert list(run.ranks) == [0, 1]
    assert len(run.series("0:output", "std").steps) == 4


def test_two_variables_do_the_same_for_any_launcher(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('out = "run"\n[[tap]]\nselect = "netG.main.0:output"\nkeep = "histogram"\nevery = 2\n')
    start(sys.executable, SCRIPTS / "gan.py", folder=tmp_path, environment={"TORCHTAP": str(plan)})
    run = tt.open(tmp_path / "run")
    assert run.histogram("netG.main.0:output", step=2).counts.sum() == 6 * 16


def test_a_module_is_run_like_python_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text((SCRIPTS / "gan.py").read_text())
    start(*RUN, "--out", "run", "-m", "package.train", folder=tmp_path)
    assert len(tt.open(tmp_path / "run").steps()) == 5


# -- what goes wrong ------------------------------------------------------------------------------------------


def test_a_script_that_fails_fails_as_ever_and_its_steps_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text((SCRIPTS / "gan.py").read_text() + "\nraise SystemExit(7)\n")
    done = start(*RUN, "--out", "run", "--every", "1", script, folder=tmp_path, expect=7)
    assert "Traceback" not in done.stderr
    assert len(tt.open(tmp_path / "run").steps()) == 5


def test_a_script_without_a_model_is_told_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "no_model.py"
    script.write_text("import sys, torch\nprint(torch.ones(2).sum().item(), sys.argv, __name__)\n")
    done = start(*RUN, script, "--lr", "1", folder=tmp_path)
    assert done.stdout == f"2.0 ['{script}', '--lr', '1'] __main__\n"
    assert done.stderr.splitlines() == [
        "torchtap: no model was seen that an optimizer trains: nothing was recorded"
    ]
    assert not (tmp_path / "runs").exists()


def test_a_script_without_torch_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('done')\n")
    done = start(*RUN, script, folder=tmp_path)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_folder_that_cannot_be_made_costs_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = start(*RUN, "--out", "file/run", SCRIPTS / "gan.py", folder=tmp_path)
    assert len(losses_of(done.stdout)) == 5
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "missing.toml", "x.py"], "the plan 'missing.toml' cannot be read"),
        (["--every", "0", "x.py"], "every=0"),
        (["--nonsense", "x.py"], "No such option"),
        (["no-such-command"], "neither a Python script nor a command"),
        ([], "what is to be run?"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchtap.cli.run.become", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense = 1", "no setting 'nonsense'"),
        ("[[tap]]\nkeep = 'full'", "has to say what to select"),
        ("out = ", "is no TOML"),
        ("every = 'x'", "every='x'"),
        ("share = 2", "lies between 0 and 1"),
    ],
)
def test_a_plan_that_makes_no_sense_says_why(tmp_path: Path, text: str, said: str) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    with pytest.raises(PlanError, match=said):
        Settings.from_environment(str(plan))


def test_a_script_runs_though_the_variable_names_no_plan(tmp_path: Path) -> None:
    done = start(
        sys.executable, SCRIPTS / "gan.py", folder=tmp_path, environment={"TORCHTAP": "missing.toml"}
    )
    assert len(losses_of(done.stdout)) == 5
    assert done.stderr.count("torchtap: this training is not recorded") == 1


INTERRUPTED = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
{end}
"""


def test_a_script_that_an_interrupt_ends_dies_of_it_as_ever(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.format(end="raise KeyboardInterrupt"))
    start(sys.executable, script, folder=tmp_path, expect=-signal.SIGINT)
    done = start(*RUN, "--out", "run", script, folder=tmp_path, expect=-signal.SIGINT)
    assert "torchtap view run" in done.stderr
    assert len(tt.open(tmp_path / "run").steps()) == 3


def test_a_script_that_deals_with_an_interrupt_ends_as_it_says(tmp_path: Path) -> None:
    script = tmp_path / "caught.py"
    script.write_text(
        INTERRUPTED.format(
            end="try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    raise SystemExit(3)"
        )
    )
    start(*RUN, "--out", "run", script, folder=tmp_path, expect=3)


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file stands where the folder should be")
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED.format(end="raise SystemExit(3)"))
    done = start(*RUN, "--out", "taken/run", script, folder=tmp_path, expect=3)
    assert done.stderr.splitlines() == [
        "torchtap: this training is not recorded: cannot begin a run in taken/run: Not a directory"
    ]


@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_the_variable_can_say_no(tmp_path: Path, word: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED.format(end=""))
    done = start(sys.executable, script, folder=tmp_path, environment={"TORCHTAP": word})
    assert done.stderr == ""
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_recording_becomes_rarer_where_it_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("torchtap.plan.next_live.time.perf_counter", lambda: now)
    pace = Pace(every=10, share=0.02)
    live = []
    for step in range(400):
        if pace(Moment(step)):
            live.append(step)
            now += 0.5  # half of a step more
        now += 1.0
    assert pace.every == 25  # 0.5 / 0.02
    assert live[:2] == [0, 10]
    assert 45 <= live[2] <= 50  # two steps have cost a second, which 2 % of 50 seconds cover
    assert live[-1] - live[-2] == 25


@pytest.mark.parametrize("doctor", [False, True])
def test_a_dry_run_states_the_cost_and_records_nothing(tmp_path: Path, doctor: bool) -> None:
    options = ["--doctor"] if doctor else []
    done = start(*RUN, "--dry-run", *options, SCRIPTS / "gpt.py", folder=tmp_path)
    for word in ("device memory", "host memory", "disk", "time"):
        assert word in done.stderr
    assert "step" not in done.stdout  # the script did not train
    assert "not counted" not in done.stderr
    assert not list(tmp_path.rglob("*.tap*"))
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_two_models_names_what_is_not_known(tmp_path: Path) -> None:
    done = start(*RUN, "--dry-run", SCRIPTS / "gan.py", folder=tmp_path)
    assert "not counted    output, grad_output" in done.stderr
