"""``pytest --trial``: what is collected, what is printed, and how invalid input is reported."""

from __future__ import annotations

import json
import signal
import sys
from xml.etree import ElementTree

import pytest

# What pytester imports while it runs pytest in this process it forgets again, which numpy and torch do not survive.
from det_lightning.testing.checks import CHECKS
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.reference import record_ours
from det_lightning.testing.training.trainings import TrialRuns
from tests.testing.changed_trials import CORRECT, case
from tests.testing.recorded_trials import write_record
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

HPARAMS = {"lr": 0.02, "global_batch_size": 4}
TRIAL = ("--trial", "model_def:MyTrial", "--trial-hparams", json.dumps(HPARAMS))
CONFIG = """
name: small
entrypoint: model_def:MyTrial
hyperparameters:
  lr: {type: log, minval: -3, maxval: -1, base: 10}
  global_batch_size: {type: categorical, vals: [4, 8]}
searcher: {name: single, metric: validation_loss, max_length: {batches: 10}}
"""
QUICK = "seed or validates"
TRAINS = "trains and not (through or under)"


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests of this repository choose their own way of importing test files.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def run(pytester: pytest.Pytester, *arguments: str, source: str = CORRECT) -> pytest.RunResult:
    pytester.makepyfile(model_def=source)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def test_each_check_is_collected(pytester: pytest.Pytester) -> None:
    names = [check.name for check in CHECKS if check.option is None]
    result = run(pytester, *TRIAL, "--collect-only", "-q")
    result.stdout.fnmatch_lines([*(f"model_def:MyTrial::{name}" for name in names), "22 tests collected*"])


def test_output_ends_with_checks(pytester: pytest.Pytester) -> None:
    result = run(pytester, *TRIAL, "--trial-quick")
    result.assert_outcomes(passed=16)
    result.stdout.fnmatch_lines(["*checks of model_def:MyTrial*", "[[]x[]] trains", "[[]x[]] is deterministic*"])
    result.stdout.fnmatch_lines(["--trial-quick left out the 6 checks that start other processes."])


def test_terminal_and_junit_agree(pytester: pytest.Pytester) -> None:
    counting = case("a counter and a sum")(
        init="self.seen = 0",
        first="self.seen += 1",
        loss="self.loss(batch) * (1 + torch.rand(()))",
        evaluated='{"validation_loss": self.loss(batch) * len(batch[0])}',
    )
    chosen = ("--trial-quick", "-k", "complete or contains or grow or JSON")
    result = run(pytester, *TRIAL, *chosen, "--junit-xml", "junit.xml", source=counting.source)
    result.assert_outcomes(passed=2, failed=1)
    remark = "trial (MyTrial): seen (model_def.py:*) is not in the checkpoint, which changed nothing in * batches"
    result.stdout.fnmatch_lines([f"[[]x[]] checkpoint contains*  remark: {remark}"])
    reason = "Validation metric 'validation_loss' is a sum over the batch: * with batches of 4, and * of 2."
    result.stdout.fnmatch_lines([f"[[] []] metrics do not grow*  {reason}"])
    junit = (pytester.path / "junit.xml").read_text()
    assert "which changed nothing in" in junit
    assert "is a sum over the batch" in junit


def test_checks_and_tests_run_together(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_one():\n    pass")
    run(pytester, *TRIAL, "-k", "test_one or device").assert_outcomes(passed=2)


def test_failure_has_no_traceback(pytester: pytest.Pytester) -> None:
    unseeded = case("unseeded")(returned='{"loss": loss * np.random.default_rng().random()}')
    result = run(pytester, *TRIAL, "-k", QUICK, source=unseeded.source)
    result.assert_outcomes(passed=1, failed=1)
    message = "Two runs with seed 0 are not the same. The first difference is the metric loss at batch 0: * apart*"
    result.stdout.fnmatch_lines([message, "Usual causes:", "*np.random.default_rng()*"])
    result.stdout.fnmatch_lines(["[[] []] is deterministic under a seed*"])
    assert "check.run" not in result.stdout.str()


SIGTERM = "if batch_idx == 3: os.kill(os.getpid(), 15)"
SWALLOWED = f"try:\n    {SIGTERM}\nexcept BaseException:\n    raise OSError"


@pytest.mark.parametrize("lines", [SIGTERM, SWALLOWED])
def test_sigterm_is_no_verdict(pytester: pytest.Pytester, lines: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pytester.makepyfile(test_later="def test_later():\n    pass")
    result = run(pytester, *TRIAL, "-k", TRAINS, "test_later.py", source=case("SIGTERM")(first=lines).source)
    assert result.ret == 128 + signal.SIGTERM
    result.stdout.fnmatch_lines(["*Exit: received SIGTERM: the check that was under way has no result*"])
    assert "fail" not in result.stdout.str().lower()
    assert signal.getsignal(signal.SIGTERM) == before


def test_last_failed_works(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(model_def=case("step")(step="self.sgd.step()").source)
    chosen = ("-k", "context or device", "--junit-xml", "junit.xml")
    pytester.runpytest_inprocess(*TRIAL, *chosen).assert_outcomes(passed=1, failed=1)
    pytester.runpytest_inprocess(*TRIAL, "--lf").assert_outcomes(failed=1)
    cases = ElementTree.parse(pytester.path / "junit.xml").findall(".//testcase")
    assert {case.get("name"): case.find("failure") is not None for case in cases}["trains through its context"]
    assert {case.get("classname") for case in cases} == {"model_def:MyTrial"}


def test_checks_run_under_xdist(pytester: pytest.Pytester, warm_python: WarmPython) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(model_def=CORRECT)
    pytest_in_a_process = [warm_python.executable, "-m", "pytest", "--basetemp", str(pytester.path / "temporary")]
    chosen = ("-k", "device or groups or process-group", "-n", "1", "-p", "no:cacheprovider")
    result = pytester.run(*pytest_in_a_process, *TRIAL, *chosen)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["[[]x[]] uses no hard-coded device"])


def test_configuration_mistakes_have_lines(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", const=f"{CONFIG}max_restarts: many\nmin_validation_period: 3\n")
    result = run(pytester, *TRIAL[:2], "--trial-config", "const.yaml", "-k", QUICK)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*const.yaml has 2 mistakes:", "*line 7: max_restarts: must be an integer; got 'many'",
                                 "*line 8: min_validation_period: must be one of*"])  # fmt: skip


def test_reference_supplies_hparams(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(model_def=CORRECT)
    runs = TrialRuns(TrialOptions("model_def:MyTrial", pytester.path, HPARAMS))
    write_record(record_ours(runs.source, runs.reference_settings), pytester.path / "ref.json")
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-reference", "ref.json", "-k", "real or seed")
    result.assert_outcomes(passed=2)


def test_missing_searcher_metric_is_named(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", const=CONFIG.replace("validation_loss", "accuracy"))
    result = run(pytester, *TRIAL[:2], "--trial-config", "const.yaml", "-k", "validates")
    line = "searcher.metric of the configuration is 'accuracy', but the validation returns validation_loss."
    result.stdout.fnmatch_lines([line])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--trial", "model_def"], "*--trial must be module:Class, such as model_def:MyTrial; got 'model_def'."),
        (["--trial", "m:T", "--trial-hparams", "{lr: 1}"], "*--trial-hparams must be a JSON object*got '{lr: 1}'*"),
        (["--trial", "m:T", "--trial-batches", "3"], "*--trial-batches must be at least 6; got 3."),
        (["--trial", "m:T", "--trial-report", "no/r.html"], "*There is no directory */no for r.html."),
        (["--trial", "m:T", "--trial-report", "p.html"], "*--trial-report needs jinja2 and plotly: pip install *"),
        (["--trial", "m:T", "--trial-config", "no.yaml"], "*no.yaml: cannot be read: No such file*"),
    ],
)
def test_invalid_options_are_usage_errors(
    arguments: list[str], line: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([line])


def test_failed_import_shows_own_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(layers="def make():\n    return 1 / 0\n")
    result = run(pytester, "--trial", "model_def:MyTrial", source="import layers\n\nSIZE = layers.make()\n")
    frames = ['  File "model_def.py", line 3, in <module>', '  File "layers.py", line 2, in make']
    lines = ["model_def cannot be imported:", *frames, "*ZeroDivisionError: division by zero"]
    result.stdout.fnmatch_lines(lines)
    assert "importlib" not in result.stdout.str()
    assert result.ret == pytest.ExitCode.INTERRUPTED


#: By a trial, how it is asked for, and the messages.
EXPLAINED: dict[str, tuple[str, tuple[str, ...], list[str]]] = {
    "missing module": (
        CORRECT,
        ("--trial", "modeldef:MyTrial"),
        ["There is no module 'modeldef' in *. The modules there are model_def."],
    ),
    "missing class": (
        CORRECT,
        ("--trial", "model_def:MyTrail"),
        ["model_def has no class MyTrail. The trials in it are: MyTrial. Did you mean MyTrial?"],
    ),
    "exit": (
        case("exit")(first="if batch_idx == 3:\n    raise SystemExit(7)").source,
        TRIAL,
        ["model_def:MyTrial fails while it trains on batch 3: SystemExit: 7"],
    ),
    "missing hyperparameters": (
        CORRECT.replace("lr=0.05", "lr=context.get_hparams()['head']['lr']").replace(
            "torch.nn.Dropout(0.1)", "torch.nn.Dropout(context.get_hparam('dropout'))"
        ),
        ("--trial", "model_def:MyTrial", "--trial-hparams", '{"width": 4}'),
        [
            "*needs hyperparameters that were not passed (passed: width):",
            *(f"  - {name} (model_def.py:*)" for name in ("dropout", "lr", "head", "global_batch_size")),
            '*--trial-hparams \'{"dropout": ...*',
        ],
    ),
    "missing arguments": (
        CORRECT.replace("def __init__(self, context):", "def __init__(self, context, width, depth=2):"),
        TRIAL,
        ["*needs arguments beyond its context: width. Pass them with --trial-kwargs '{\"width\": ...}'*"],
    ),
    "refused hyperparameters": (
        case("refusing")(above="import determined", init="raise determined.InvalidHP('lr is odd')").source,
        TRIAL,
        ["*refuses its hyperparameters while the trial is built, with InvalidHP: lr is odd", "They are lr=0.02,*"],
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_failure_is_explained(pytester: pytest.Pytester, name: str) -> None:
    source, arguments, lines = EXPLAINED[name]
    result = run(pytester, *arguments, "-k", TRAINS, source=source)
    result.stdout.fnmatch_lines(lines)
    assert result.ret != pytest.ExitCode.OK


def test_arguments_are_passed(pytester: pytest.Pytester) -> None:
    source, arguments, _ = EXPLAINED["missing arguments"]
    result = run(pytester, *arguments, "--trial-kwargs", '{"width": 3}', "-k", TRAINS, source=source)
    result.assert_outcomes(passed=1)


@pytest.mark.determined
def test_trial_gets_hparams_argument(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace("def __init__(self, context):", "def __init__(self, context, hparams):")
    source = source.replace('context.get_hparam("lr")', 'hparams["lr"]')
    run(pytester, *TRIAL, "-k", f"({TRAINS}) or real", source=source).assert_outcomes(passed=2)


@pytest.mark.determined
def test_metric_changed_later_is_named(pytester: pytest.Pytester) -> None:
    changing = case("changing")(returned='{"loss": loss, "bias": self.head.bias.data[0]}')
    result = run(pytester, *TRIAL, "-k", "real", source=changing.source)
    result.stdout.fnmatch_lines(["det_lightning reports 'bias' as it was returned, the reference as it became later.*"])
