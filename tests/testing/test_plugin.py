"""``pytest --trial``: what is collected, what is printed, and how invalid input is reported."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

# What pytester imports while it runs pytest in this process it forgets again, which numpy and torch do not survive.
import det_lightning.config
import det_lightning.testing.report
from det_lightning.testing.options import TrialOptions
from det_lightning.testing.training.reference import record_ours
from det_lightning.testing.training.runs import TrialRuns
from tests.warm_python import WarmPython

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

CORRECT = Path(__file__).with_name("correct_trial.py").read_text()
HPARAMS = '{"lr": 0.02, "global_batch_size": 4}'
CONFIG = """
name: small
entrypoint: model_def:MyTrial
hyperparameters:
  lr: {type: log, minval: -3, maxval: -1, base: 10}
  global_batch_size: {type: categorical, vals: [4, 8]}
searcher: {name: single, metric: validation_loss, max_length: {batches: 10}}
"""
QUICK = "seed or validates"
TRAINS = "trains and not (through or under or equally)"


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests of this repository choose their own way of importing test files.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def run(pytester: pytest.Pytester, *arguments: str, source: str = CORRECT) -> pytest.RunResult:
    pytester.makepyfile(model_def=source)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def test_texts_speak_of_checks(pytester: pytest.Pytester) -> None:
    package = Path(det_lightning.testing.report.__file__).parent
    files = [*package.rglob("*.py"), *package.glob("*.jinja"), package.parents[1] / "docs" / "testing.md"]
    assert [file.name for file in files if "promise" in file.read_text().lower()] == []
    result = run(pytester, "--help", "--markers")
    assert "promise" not in result.stdout.str()


def test_each_check_is_collected(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "--collect-only", "-q")
    result.stdout.fnmatch_lines(
        [
            "model_def:MyTrial::trains",
            "model_def:MyTrial::is deterministic under a seed",
            "model_def:MyTrial::is deterministic in another process",
            "model_def:MyTrial::moves every trainable parameter",
            "*::validates with JSON-serializable metrics of stable names",
            "*::is not changed by a validation",
            "*::validation metrics do not grow with the batch",
            "*::trains through its context",
            "*::uses no hard-coded device",
            "*::has no process-group code of its own",
            "*::checkpoint contains all the state that training changes",
            "*::checkpoint round-trips",
            "*::resumes bit-equal in the middle of an epoch",
            "*::resumes bit-equal at the end of an epoch",
            "*::resumes bit-equal right after a validation",
            "*::resumes bit-equal in the middle of an aggregation",
            "*::trains under aggregation",
            "*::trains equally under both APIs",
            "*::two processes train on the samples of one",
            "*::two processes keep their weights equal",
            "*::two processes agree with one",
            "*::two processes validate like one",
            "*::matches the real determined",
            "23 tests collected*",
        ]
    )


def test_output_ends_with_checks(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "--trial-quick")
    result.assert_outcomes(passed=17)
    result.stdout.fnmatch_lines(["*checks of model_def:MyTrial*", "[[]x[]] trains", "[[]x[]] is deterministic*"])
    result.stdout.fnmatch_lines(["--trial-quick left out the 6 checks that start other processes."])


def test_terminal_and_junit_agree(pytester: pytest.Pytester) -> None:
    counting = CORRECT.replace("        self.best = Best()\n", "        self.best = Best()\n        self.seen = 0\n")
    source = counting.replace(LOSS, f"        self.seen += 1\n{LOSS} * (1 + torch.rand(()))").replace(
        'return {"validation_loss": self.loss(batch)}', 'return {"validation_loss": self.loss(batch) * len(batch[0])}'
    )
    chosen = ("--trial-quick", "-k", "complete or contains or grow or JSON")
    arguments = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, *chosen, "--junit-xml", "junit.xml")
    result = run(pytester, *arguments, source=source)
    result.assert_outcomes(passed=2, failed=1)
    remark = "trial (MyTrial): seen (model_def.py:*) is not in the checkpoint, which changed nothing in * batches"
    result.stdout.fnmatch_lines([f"[[]x[]] checkpoint contains*  remark: {remark}"])
    reason = "Validation metric 'validation_loss' is a sum over the batch: * with batches of 4, and * of 2."
    result.stdout.fnmatch_lines([f"[[] []] validation metrics*  {reason}"])
    junit = (pytester.path / "junit.xml").read_text()
    assert "which changed nothing in" in junit
    assert "is a sum over the batch" in junit


def test_checks_and_tests_run_together(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_one():\n    pass")
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", "test_one or device")
    result.assert_outcomes(passed=2)


def test_failure_has_no_traceback(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace('return {"loss": loss}', 'return {"loss": loss * np.random.default_rng().random()}')
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", QUICK, source=source)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "Two runs with seed 0 are not the same. The first difference is the metric loss at batch 0: * apart*",
            "Usual causes:",
            "*np.random.default_rng()*",
            "[[] []] is deterministic under a seed*",
        ]
    )
    assert "check.run" not in result.stdout.str()


def sending(line: str) -> str:
    """Return the trial, which executes a line on its fourth batch."""
    return CORRECT.replace("        loss = self.loss(batch)", f"        if batch_idx == 3:\n            {line}\n{LOSS}")


LOSS = "        loss = self.loss(batch)"
SIGTERM = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"


SWALLOWED = f"try:\n                {SIGTERM}\n            except BaseException:\n                raise OSError"


@pytest.mark.parametrize("line", [SIGTERM, SWALLOWED])
def test_sigterm_is_no_verdict(pytester: pytest.Pytester, line: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    arguments = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", TRAINS)
    pytester.makepyfile(test_later="def test_later():\n    pass")
    result = run(pytester, *arguments, "test_later.py", source=sending(line))
    assert result.ret == 128 + signal.SIGTERM
    result.stdout.fnmatch_lines(["*Exit: received SIGTERM: the check that was under way has no result*"])
    assert "fail" not in result.stdout.str().lower()
    assert signal.getsignal(signal.SIGTERM) == before


def test_exit_of_the_trial_fails(pytester: pytest.Pytester) -> None:
    arguments = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", TRAINS)
    result = run(pytester, *arguments, source=sending("raise SystemExit(7)"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["model_def:MyTrial fails while it trains on batch 3: SystemExit: 7"])


def test_markers_and_last_failed_work(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace("self.context.step_optimizer(self.sgd)", "self.sgd.step()")
    pytester.makepyfile(model_def=source)
    trial = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS)
    first = pytester.runpytest_inprocess(*trial, "-m", "trial_context or trial_metrics", "--junit-xml", "junit.xml")
    first.assert_outcomes(passed=5, failed=1)
    again = pytester.runpytest_inprocess(*trial, "--lf")
    again.assert_outcomes(failed=1)
    cases = ElementTree.parse(pytester.path / "junit.xml").findall(".//testcase")
    assert {case.get("name"): case.find("failure") is not None for case in cases}["trains through its context"]
    assert {case.get("classname") for case in cases} == {"model_def:MyTrial"}


def test_checks_run_under_xdist(pytester: pytest.Pytester, warm_python: WarmPython) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(model_def=CORRECT)
    trial = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", "device or groups or process-group")
    pytest_in_a_process = [warm_python.executable, "-m", "pytest", "--basetemp", str(pytester.path / "temporary")]
    result = pytester.run(*pytest_in_a_process, *trial, "-n", "1", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["[[]x[]] uses no hard-coded device"])


@pytest.mark.parametrize(
    "entrypoint",
    ["model_def:MyTrial", "python3 -m determined.exec.harness model_def:MyTrial", "[x, --trial, 'model_def:MyTrial']"],
)
def test_configuration_names_the_trial(pytester: pytest.Pytester, entrypoint: str) -> None:
    pytester.makefile(".yaml", const=CONFIG.replace("entrypoint: model_def:MyTrial", f"entrypoint: {entrypoint}"))
    result = run(pytester, "--trial-config", "const.yaml", "-k", QUICK)
    result.assert_outcomes(passed=2)


def test_configuration_mistakes_have_lines(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", const=f"{CONFIG}max_restarts: many\nmin_validation_period: 3\n")
    result = run(pytester, "--trial-config", "const.yaml", "-k", QUICK)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*const.yaml has 2 mistakes:", "*line 7: max_restarts: must be an integer; got 'many'",
                                 "*line 8: min_validation_period: must be one of*"])  # fmt: skip


def test_fields_without_effect_are_warned_of(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", const=f"{CONFIG}max_restarts: 3\nmine: 4\nperform_initial_validation: true\n")
    result = run(pytester, "--trial-config", "const.yaml", "-k", "moves", "-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*have no effect on the checks: max_restarts; line 8: mine: unknown key*"])


def test_reference_supplies_hparams(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(model_def=CORRECT)
    runs = TrialRuns(TrialOptions("model_def:MyTrial", pytester.path, json.loads(HPARAMS)))
    record_ours(runs.source, runs.reference_settings).write(pytester.path / "ref.json")
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-reference", "ref.json", "-k", "real or seed")
    result.assert_outcomes(passed=2)


def test_missing_searcher_metric_is_named(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", const=CONFIG.replace("validation_loss", "accuracy"))
    result = run(pytester, "--trial-config", "const.yaml", "-k", "validates")
    result.stdout.fnmatch_lines(
        ["searcher.metric of the configuration is 'accuracy', but the validation returns validation_loss."]
    )


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--trial", "model_def"], ["*--trial must be module:Class, such as model_def:MyTrial; got 'model_def'."]),
        (["--trial", "m:T", "--trial-hparams", "{lr: 1}"], ["*--trial-hparams must be a JSON object*got '{lr: 1}'*"]),
        (["--trial", "m:T", "--trial-batches", "3"], ["*--trial-batches must be at least 6; got 3."]),
        (["--trial", "m:T", "--trial-config", "no.yaml"], ["*no.yaml: cannot be read: No such file*"]),
    ],
)
def test_invalid_options_are_usage_errors(pytester: pytest.Pytester, arguments: list[str], lines: list[str]) -> None:
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(lines)


def test_report_without_plotly_is_a_usage_error(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-report", "page.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--trial-report needs jinja2 and plotly: pip install *"])


def test_failed_import_shows_own_frames(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(layers="def make():\n    return 1 / 0\n")
    result = run(pytester, "--trial", "model_def:MyTrial", source="import layers\n\nSIZE = layers.make()\n")
    result.stdout.fnmatch_lines(
        [
            "model_def cannot be imported:",
            '  File "model_def.py", line 3, in <module>',
            '  File "layers.py", line 2, in make',
            "*ZeroDivisionError: division by zero",
        ]
    )
    assert "importlib" not in result.stdout.str()
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_missing_module_lists_others(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--trial", "modeldef:MyTrial")
    result.stdout.fnmatch_lines(["There is no module 'modeldef' in *. The modules there are model_def."])


def test_missing_class_lists_trials(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--trial", "model_def:MyTrail")
    result.stdout.fnmatch_lines(
        ["model_def has no class MyTrail. The trials in it are: MyTrial. Did you mean MyTrial?"]
    )


def test_missing_hparams_are_all_named(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace("lr=0.05", "lr=context.get_hparams()['head']['lr']")
    source = source.replace("torch.nn.Dropout(0.1)", "torch.nn.Dropout(context.get_hparam('dropout'))")
    result = run(
        pytester, "--trial", "model_def:MyTrial", "--trial-hparams", '{"width": 4}', "-k", TRAINS, source=source
    )
    result.stdout.fnmatch_lines(
        [
            "*needs hyperparameters that were not passed (passed: width):",
            "  - dropout (model_def.py:*)",
            "  - lr (model_def.py:*)",
            "  - head (model_def.py:*)",
            "  - global_batch_size (model_def.py:*)",
            '*--trial-hparams \'{"dropout": ...*',
        ]
    )


def test_missing_arguments_are_named(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace("def __init__(self, context):", "def __init__(self, context, width, depth=2):")
    trial = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", TRAINS)
    result = run(pytester, *trial, source=source)
    result.stdout.fnmatch_lines(
        ["*needs arguments beyond its context: width. Pass them with --trial-kwargs '{\"width\": ...}'*"]
    )
    run(pytester, *trial, "--trial-kwargs", '{"width": 3}', source=source).assert_outcomes(passed=1)


@pytest.mark.determined
def test_trial_gets_hparams_argument(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace("def __init__(self, context):", "def __init__(self, context, hparams):")
    source = source.replace('context.get_hparam("lr")', 'hparams["lr"]')
    trial = ("--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS)
    run(pytester, *trial, "-k", f"({TRAINS}) or real", source=source).assert_outcomes(passed=2)


def test_refused_hparams_are_named(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace("        self.context = context\n", "        raise determined.InvalidHP('lr is odd')\n")
    source = source.replace("from determined import pytorch", "import determined\nfrom determined import pytorch")
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", TRAINS, source=source)
    result.stdout.fnmatch_lines(
        ["*refuses its hyperparameters while the trial is built, with InvalidHP: lr is odd", "They are lr=0.02,*"]
    )


@pytest.mark.determined
def test_metric_changed_later_is_named(pytester: pytest.Pytester) -> None:
    source = CORRECT.replace('return {"loss": loss}', 'return {"loss": loss, "bias": self.head.bias.data[0]}')
    result = run(pytester, "--trial", "model_def:MyTrial", "--trial-hparams", HPARAMS, "-k", "real", source=source)
    result.stdout.fnmatch_lines(["det_lightning reports 'bias' as it was returned, the reference as it became later.*"])
