"""How many of Lightning's own tests that pass with ``ddp`` also pass with ``freescale``.

    pip install pytest-rerunfailures scikit-learn psutil pandas cloudpickle
    python -m tests.lightning_suite LIGHTNING [--only PART ...] [--json]

``LIGHTNING`` is a checkout of Lightning's repository at the tag of the installed version, or close to it. Both runs together take
about half an hour on two cores. The tests that fail with ``freescale`` alone are printed with the end of their message.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tests") / "tests_pytorch"
STRATEGIES = ("ddp", "freescale")
SECONDS = 3600  # the longest run of one part
# Tests of the Trainer and of what users combine with it. Tests of other strategies, accelerators and launchers are left out.
PARTS = {
    "checkpoints": "checkpointing callbacks/test_model_checkpoint_additional_cases.py "
    "callbacks/test_model_checkpoint_edge_cases.py callbacks/test_model_checkpoint_manual_opt.py "
    "callbacks/test_model_checkpoint_step_interval_val_metric.py models/test_restore.py models/test_hooks.py "
    "trainer/connectors/test_checkpoint_connector.py",
    "loops": "loops",
    "trainer": "trainer/test_trainer.py trainer/test_dataloaders.py",
    "flags": "trainer/flags trainer/logging_ trainer/optimization trainer/properties trainer/test_states.py "
    "trainer/test_config_validator.py trainer/connectors/test_callback_connector.py "
    "trainer/connectors/test_data_connector.py trainer/connectors/test_signal_connector.py trainer/dynamic_args",
    "callbacks": "callbacks/progress callbacks/test_callback_hook_outputs.py callbacks/test_callbacks.py "
    "callbacks/test_device_stats_monitor.py callbacks/test_early_stopping.py callbacks/test_finetuning_callback.py "
    "callbacks/test_gradient_accumulation_scheduler.py callbacks/test_lambda_function.py callbacks/test_lr_monitor.py "
    "callbacks/test_model_summary.py callbacks/test_prediction_writer.py callbacks/test_pruning.py "
    "callbacks/test_rich_model_summary.py callbacks/test_spike.py callbacks/test_stochastic_weight_avg.py "
    "callbacks/test_throughput_monitor.py callbacks/test_timer.py callbacks/test_weight_averaging.py",
    "models": "core tuner models/test_cpu.py models/test_amp.py models/test_hparams.py models/test_fabric_integration.py "
    "utilities/test_model_summary.py utilities/test_combined_loader.py utilities/test_data.py "
    "utilities/test_auto_restart.py utilities/test_grads.py utilities/test_compile.py overrides "
    "loggers/test_csv.py loggers/test_tensorboard.py loggers/test_all.py loggers/test_logger.py "
    "plugins/test_checkpoint_io_plugin.py plugins/test_async_checkpoint.py plugins/test_amp_plugins.py "
    "plugins/precision/test_double.py plugins/precision/test_half.py plugins/precision/test_all.py",
    # Behind many other tests, a failure of this file can end pytest with an internal error. So it has a session of its own.
    "profilers": "profilers/test_profiler.py",
}


def run(lightning: Path, strategy: str, part: str, folder: Path) -> dict[str, str]:
    """The tests of ``part`` that ran, with the end of their message; the message of a test that passed is empty."""
    report = folder / f"{part}_{strategy}.xml"
    tests = lightning / TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lightning_suite.plugin", "-p", "pytest_timeout"]
    command += ["-p", "pytest_rerunfailures", "--timeout", "120", "-p", "no:cacheprovider", "--tb=short", "--color=no"]
    command += ["-c", str(lightning / "pyproject.toml"), "--rootdir", str(lightning / "tests"), f"--junitxml={report}"]
    command += ["--continue-on-collection-errors", "-o", "addopts=--strict-markers --disable-pytest-warnings"]
    command += [name for name in PARTS[part].split() if (tests / name).exists()]
    env = os.environ | {
        "FREESCALE_SUITE_STRATEGY": strategy,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(lightning / "tests"), os.environ.get("PYTHONPATH", "")]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (folder / f"{part}_{strategy}.log").open("w") as log:
        subprocess.run(command, cwd=tests, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS, check=False)
    if not report.exists():
        raise SystemExit(f"{part} with {strategy}: pytest wrote no report\n{Path(log.name).read_text()[-2000:]}")
    found = {}
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            broken = [part for part in case if part.tag in ("failure", "error")]
            found[f"{case.get('classname')}.{case.get('name')}"] = (broken[0].text or "failed")[-300:] if broken else ""
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lightning", type=Path, metavar="LIGHTNING", help="checkout of Lightning's repository")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some of the parts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args()
    if not (options.lightning / TESTS).is_dir():
        parser.error(f"{options.lightning}: has no {TESTS}; give a checkout of Lightning's repository")
    passed, failing = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.only:
            ddp, freescale = (run(options.lightning.resolve(), strategy, part, Path(folder)) for strategy in STRATEGIES)
            good = [name for name, message in ddp.items() if not message]
            passed += len(good)
            failing |= {name: freescale.get(name, "it did not run") for name in good if freescale.get(name, "?")}
            print(
                f"{part}: {len(good)} pass with ddp; {len(failing)} of all so far fail with freescale", file=sys.stderr
            )
    if options.json:
        print(json.dumps({"pass with ddp": passed, "fail with freescale": failing}, indent=1))
        return 0
    for name, message in failing.items():
        print(f"{name}\n    " + "\n    ".join(message.splitlines()[-3:]))
    print(f"{passed - len(failing)} of the {passed} tests that pass with ddp pass with freescale")
    return 0


if __name__ == "__main__":
    sys.exit(main())
