"""The files of deploy/ for training: what they start, with this machine in the place of a cluster."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from documents import ROOT, check_command

from unrolled.training import read_log

pytestmark = pytest.mark.checkout
SLURM = ROOT / "deploy" / "train.slurm"


def test_the_job_of_kubernetes_starts_the_command_on_all_pods() -> None:
    with (ROOT / "deploy" / "train.yaml").open() as file:
        service, job = yaml.safe_load_all(file)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    words = container["args"]
    check_command([*container["command"], *words])
    options = dict(word.split("=", 1) for word in words if word.startswith("--"))
    assert int(options["--nnodes"]) == spec["completions"] == spec["parallelism"]
    assert int(options["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    # An indexed job calls its pods NAME-0, NAME-1 ..., and a headless service gives them addresses.
    name, port = job["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options["--rdzv-endpoint"] == f"{name}-0.{pod['subdomain']}:{port}"
    assert {x["name"] for x in container["volumeMounts"]} == {x["name"] for x in pod["volumes"]}


def slurm(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Run the script as Slurm would on one machine, with commands of our own in the place of Slurm's."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in {
        "srun": 'echo $$ > srun.pid; exec "$@"',
        "scontrol": 'echo "$@" >> scontrol.log; [ "$1" = show ] && echo localhost || true',
        "scancel": 'echo "$@" >> scancel.log; kill -TERM "$(cat srun.pid)"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").touch()
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_NODELIST": "n",
    }
    port = {"UNROLLED_PORT": str(20_000 + os.getpid() % 10_000), "UNROLLED_VENV": str(folder / "venv")}
    environment = os.environ | job | port | {"PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["bash", str(SLURM), *words], cwd=folder, env=environment, start_new_session=True)


@pytest.mark.scale
@pytest.mark.skipif(shutil.which("bash") is None, reason="the script is one of bash")
def test_the_script_of_slurm_trains_and_queues_the_job_again_before_its_time_is_over(tmp_path: Path) -> None:
    settings = ["data.name=copy", "data.length=8", "model.d_model=8", "model.n_layers=1", "model.n_heads=1"]
    settings += ["train.batch_size=4", "train.steps=1000000", "train.threads=1", "run_dir=run"]
    started = slurm(tmp_path, *settings)
    try:
        deadline = time.monotonic() + 90
        while not [x for x in read_log(tmp_path / "run" / "log.jsonl") if x["event"] == "train"]:
            assert time.monotonic() < deadline
            assert started.poll() is None
            time.sleep(0.1)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    assert (tmp_path / "scancel.log").read_text() == "--signal=TERM 17.0\n"
    assert (tmp_path / "scontrol.log").read_text() == "show hostnames n\nrequeue 17\n"
    steps = [x["step"] for x in read_log(tmp_path / "run" / "log.jsonl") if x["event"] == "train"]
    assert steps
    assert (tmp_path / "run" / "last.safetensors").exists()
