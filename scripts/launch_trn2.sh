#!/usr/bin/env bash
# Start a recipe on Trainium2, one rank per logical core: choose the ranks, set what must be set before Python starts, look
# at this machine, and become torchrun. docs/launching.md explains it. Written from documentation, not yet run on Trainium.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
problems=() notes=() rows=() listed=' '

problem() { problems+=("$1"); }
die() { echo "error: $1" >&2; exit 2; }

usage() {
    cat <<'EOF'
usage: scripts/launch_trn2.sh [--dry-run] [--force] RECIPE [--section.field VALUE ...]

  --dry-run      print the environment and the torchrun line; look at nothing, start nothing
  --force        start even if the checks of this machine find a problem

Settings, from the environment:
  INSTANCE       trn2.48xlarge (default): 16 chips, 128 physical cores, 64 logical cores at LNC=2
                 trn2.3xlarge: 1 chip, 8 physical cores, 4 logical cores at LNC=2
  LNC            physical cores in a logical core: 2 (default) or 1, which doubles the ranks
  NPROC          ranks on this node; must equal its logical cores, or NEURON_RT_NUM_CORES if you set that
  NNODES         nodes, default 1; more need RDZV_ENDPOINT=host:port of one of them, the same on all, as RDZV_ID
  MAX_RESTARTS   times that torchrun starts all ranks again after one failed, default 0
  LOG_DIR        output of every rank, default runs/logs; the terminal shows local rank 0
  MIN_FREE_GB    free disk space asked for, default 20
A variable of PyTorch or Neuron that you have set is never changed. docs/launching.md lists them.
EOF
}

dry_run=false force=false
while [[ ${1-} == -* ]]; do
    case $1 in
        --dry-run) dry_run=true ;;
        --force) force=true ;;
        -h | --help) usage; exit 0 ;;
        *) die "unknown option '$1' before the recipe; allowed: --dry-run, --force, --help" ;;
    esac
    shift
done
if (($# == 0)); then usage >&2; exit 2; fi
for argument in "${@:2}"; do
    if [[ $argument == --dry-run || $argument == --help || $argument == -h ]]; then
        die "'$argument' after the recipe would be answered by every rank; use --dry-run before it, or train.py $1 --help"
    fi
done

# --- how many ranks ---------------------------------------------------------------------------------------------------

whole() { # NAME VALUE SMALLEST
    if [[ ! $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || (($2 < $3)); then die "$1: got '$2', allowed: a whole number, $3 or more"; fi
}

instance=${INSTANCE-trn2.48xlarge}
case $instance in
    trn2.48xlarge) chips=16 chips_in_words="16 chips" ;;
    trn2.3xlarge) chips=1 chips_in_words="1 chip" ;;
    *) die "INSTANCE: got '$instance', allowed: trn2.48xlarge, trn2.3xlarge" ;;
esac

lnc='' lnc_from=''
for name in NEURON_LOGICAL_NC_CONFIG NEURON_RT_VIRTUAL_CORE_SIZE LNC; do
    [[ -v $name ]] || continue
    [[ ${!name} == [12] ]] || die "$name: got '${!name}', allowed: 1 or 2 physical cores in a logical core"
    [[ -z $lnc || $lnc == "${!name}" ]] || die "$lnc_from=$lnc and $name=${!name} contradict each other; keep one of them"
    lnc=${!name} lnc_from=$name
done
lnc=${lnc:-2}
physical=$((chips * 8)) logical=$((chips * 8 / lnc))
size="$instance: $chips_in_words, $physical physical cores, $logical logical cores (LNC=$lnc)"

cores=$logical
if [[ -v NEURON_RT_VISIBLE_CORES ]]; then
    [[ $NEURON_RT_VISIBLE_CORES =~ ^[0-9]+$ ]] || die "NEURON_RT_VISIBLE_CORES: got '$NEURON_RT_VISIBLE_CORES', which every \
rank would inherit; allowed: one core, for one rank; for N ranks unset it and set NEURON_RT_NUM_CORES=N"
    cores=1
    ((10#$NEURON_RT_VISIBLE_CORES < logical)) || problem "NEURON_RT_VISIBLE_CORES: got $NEURON_RT_VISIBLE_CORES on $size"
elif [[ -v NEURON_RT_NUM_CORES ]]; then
    whole NEURON_RT_NUM_CORES "$NEURON_RT_NUM_CORES" 0
    if ((NEURON_RT_NUM_CORES > 0)); then cores=$NEURON_RT_NUM_CORES; fi # 0 is the runtime's word for all
    ((cores <= logical)) || problem "NEURON_RT_NUM_CORES: got $cores, allowed: at most the logical cores of $size"
fi
ranks=${NPROC-$cores}
whole NPROC "$ranks" 1
((ranks == cores)) || problem "NPROC: got $ranks ranks for $cores logical cores, allowed: $cores, as a rank drives exactly \
one ($size); unset NPROC, or limit the cores as well: NEURON_RT_NUM_CORES=$ranks"
((cores == logical)) || notes+=("$cores of $logical logical cores: which numbers below all the runtime takes is not confirmed")

nodes=${NNODES-1} max_restarts=${MAX_RESTARTS-0} min_free=${MIN_FREE_GB-20} log_dir=${LOG_DIR:-runs/logs}
whole NNODES "$nodes" 1
whole MAX_RESTARTS "$max_restarts" 0
whole MIN_FREE_GB "$min_free" 0
world=$((ranks * nodes)) endpoint=${RDZV_ENDPOINT-}
if ((nodes == 1)); then
    endpoint=${endpoint:-localhost:0} # 0: a port that is free
else
    if [[ $endpoint != ?*:[1-9]* || $endpoint == localhost:* || $endpoint == 127.* ]]; then
        problem "RDZV_ENDPOINT: got '$endpoint' for $nodes nodes, allowed: host:port of one node, the same on all"
    fi
    log_dir+=/$HOSTNAME # nodes may share the folder
    ((chips > 1)) || notes+=("several nodes need EFA, which $instance is said not to have (field note)")
fi
command=(torchrun --nnodes "$nodes" --nproc_per_node "$ranks" --rdzv_backend c10d --rdzv_endpoint "$endpoint"
    --rdzv_id "${RDZV_ID:-$1}" --max_restarts "$max_restarts" --local-ranks-filter 0 --role rank --tee 3
    --log-dir "$log_dir" "$ROOT/train.py" "$@")

# --- the environment --------------------------------------------------------------------------------------------------

tell() { # WHO NAME VALUE TRUST REASON: who sets the variable if the user has not
    local who=$1 value=$3
    if [[ -v $2 ]]; then who=user value=$(printf %q "${!2}"); fi
    rows+=("$(printf '  %-26s %-12s %s' "$who" "$4" "$2=$value  # $5")") listed+="$2 "
}
want() { # NAME VALUE TRUST REASON
    tell launcher "$@"
    [[ -v $1 ]] || { export "$1=$2"; FIRSTSTEP_LAUNCHER_SET+="$1 "; }
}
export FIRSTSTEP_LAUNCHER_SET='' # the run record says who set what

want NEURON_LOGICAL_NC_CONFIG "$lnc" documented "physical cores in each logical core${lnc_from:+, from $lnc_from}"
want NEURON_RT_NUM_CORES "$ranks" unconfirmed "documented for one process; with torchrun from a pre-release source"
tell default NEURON_RT_VISIBLE_CORES "(unset)" unconfirmed "each rank then gets the core of its LOCAL_RANK (pre-release source)"
cache_home=${XDG_CACHE_HOME:-${HOME-}/.cache}
want TORCH_NEURONX_NEFF_CACHE_DIR "$cache_home/firststep/neff" documented "compiled graphs, the same folder for every run"
tell default TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR /tmp/local_cache unconfirmed "locks of that cache (pre-release source)"
want OMP_NUM_THREADS 1 documented "PyTorch's own choice for several ranks; if set, torchrun does not warn about it"
if ((nodes > 1)); then
    efa="network between nodes; from AWS's XLA-era page"
    want FI_PROVIDER efa unconfirmed "$efa"
    want FI_EFA_USE_DEVICE_RDMA 1 unconfirmed "$efa"
    IFS=.- read -r major minor _ <<<"$(uname -r)"
    if ((major * 1000 + ${minor%%[!0-9]*} < 5015)); then want FI_EFA_FORK_SAFE 1 unconfirmed "$efa, for kernels before 5.15"; fi
fi
# What backends/neuron.py sets is read from it, so that each value is stated once.
while IFS='|' read -r name value reason; do
    trust=unconfirmed
    if [[ $name == TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION ]]; then trust=documented; fi
    tell "set by backends/neuron.py" "$name" "$value" "$trust" "$reason"
done < <(sed -nE 's/^ +\("([A-Z0-9_]+)", "([^"]*)", "([^"]*)"\),$/\1|\2|\3/p' "$ROOT/backends/neuron.py")
for name in $(compgen -e); do
    [[ $name =~ ^(NEURON_|TORCH_NEURONX_|FI_) && $listed != *" $name "* ]] || continue
    tell user "$name" '' unconfirmed "passed on as it is; nothing here depends on it"
done
cache=$TORCH_NEURONX_NEFF_CACHE_DIR
[[ -n $cache ]] || die "TORCH_NEURONX_NEFF_CACHE_DIR: got '', allowed: a folder; unset it for $cache_home/firststep/neff"

describe() {
    echo "instance     $size"
    echo "ranks        $ranks on this node, one logical core each; $world in all; nodes: $nodes"
    echo "cache        $cache"
    echo "rank output  $log_dir/<id>/attempt_<n>/<local rank>/stderr.log and stdout.log; the terminal shows local rank 0"
    echo "environment"
    printf '%s\n' "${rows[@]}" "command"
    echo " $(printf ' %q' "${command[@]}")"
    for note in "${notes[@]}"; do echo "note: $note"; done
}

# --- this machine -----------------------------------------------------------------------------------------------------

check_cores() {
    local device_nodes=${DEVICE_NODES-/dev/neuron[0-9]*} found text reported pid who # DEVICE_NODES is there for tests
    found=$(compgen -G "$device_nodes" | wc -l) || true
    if ((found == 0)); then
        problem "no device node $device_nodes: use a Trn2 instance with the Neuron driver, for example a Neuron Base DLAMI"
    elif ((cores <= logical && found * 8 / lnc < ranks || cores == logical && found != chips)); then
        problem "chips: got $found, with $((found * 8)) physical cores, $((found * 8 / lnc)) logical cores (LNC=$lnc), for \
$ranks ranks on $size; set INSTANCE, or NEURON_RT_NUM_CORES to what is there"
    fi
    if ! command -v neuron-ls >/dev/null; then
        problem "neuron-ls is not on PATH: install the Neuron tools, or add their folder to PATH"
    elif ! text=$(timeout 60 neuron-ls 2>&1); then
        problem "neuron-ls fails: ${text##*$'\n'}; check the driver"
    elif reported=$(sed -nE 's/^ *logical-neuroncore-config: *([12]) *$/\1/p' <<<"$text") && [[ -z $reported ]]; then
        notes+=("not checked: whether LNC=$lnc is this instance's (neuron-ls prints no logical-neuroncore-config)")
    elif [[ $reported != "$lnc" && -n $lnc_from ]]; then
        notes+=("neuron-ls says logical-neuroncore-config $reported; $lnc_from=$lnc is used")
    elif [[ $reported != "$lnc" ]]; then
        problem "neuron-ls: got logical-neuroncore-config $reported, so $((physical / reported)) logical cores for $ranks \
ranks; set LNC=$reported, or LNC=$lnc to insist"
    fi
    # A core belongs to exactly one process. Neuron's monitors look at devices without taking a core.
    while read -r pid; do
        who=$(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline") || continue
        [[ $who =~ ^([^ ]*/)?neuron-(ls|top|monitor)( |$) ]] ||
            problem "process $pid holds a Neuron device: ${who:0:100}; wait for it, or stop it: kill $pid"
    done < <(find /proc/[0-9]*/fd -lname "$device_nodes" 2>/dev/null | cut -d/ -f3 | sort -un)
    ((EUID == 0)) || notes+=("not checked: whether another user's process holds a core (only root sees that)")
}

check_folder() { # WHAT PATH HOW-TO-CHANGE: makes nothing, so that a refused start leaves nothing behind
    local at=$2 free
    while [[ ! -e $at ]]; do at=$(dirname -- "$at"); done
    if [[ ! -d $at || ! -w $at ]]; then
        problem "$1 $2: $at is not a folder that can be written; make it one, or choose another with $3"
        return
    fi
    free=$(df -Pk -- "$at" | awk 'NR == 2 {printf "%d", $4 * 1024 / 1e9}')
    ((free >= min_free)) || problem "$1 $2: got $free GB free, MIN_FREE_GB is $min_free; free some, or choose another with $3"
}

check_recipe() { # Python says in a fraction of a second what every rank would say
    local python=python3 version output device runs
    if command -v torchrun >/dev/null; then
        python=$(dirname "$(command -v torchrun)")/python # torchrun starts the ranks with the interpreter beside it
        [[ -x $python ]] || python=python3
    else
        problem "torchrun is not on PATH: activate the environment that has torch and torch-neuronx"
    fi
    if ! version=$("$python" -c 'import sys; print(*sys.version_info[:2])' 2>&1); then
        problem "$python does not start: ${version##*$'\n'}"
        return
    fi
    ((${version/ / * 1000 + } >= 3012)) || problem "Python: got ${version/ /.} ($python), torch-neuronx needs 3.12 or newer"
    if ! output=$(RANK=0 LOCAL_RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=localhost MASTER_PORT=29500 \
        "$python" "$ROOT/train.py" "$@" --dry-run 2>&1); then
        output=${output##*$'\n'}
        output=${output#error: }
        problem "recipe: ${output#rank 0: }" # the rank that it was asked as
        return
    fi
    device=$(sed -nE "s/^run\.device = '(.*)'$/\1/p" <<<"$output")
    runs=$(sed -nE "s/^run\.output_dir = '(.*)'$/\1/p" <<<"$output")
    [[ $device == neuron ]] || problem "recipe: got run.device '$device', allowed: neuron; add --run.device neuron"
    check_folder "run folder" "${runs:-runs}" --run.output_dir
}

settings_problems=${#problems[@]}
if ! $dry_run; then
    check_cores
    check_folder "compile cache" "$cache" TORCH_NEURONX_NEFF_CACHE_DIR
    check_recipe "$@"
    ((nodes == 1)) || notes+=("not checked: that EFA works here, and that every node reaches RDZV_ENDPOINT")
fi
for text in "${problems[@]}"; do echo "error: $text" >&2; done
if ((settings_problems > 0)) || { ((${#problems[@]} > 0)) && ! $force; }; then exit 2; fi
if $dry_run; then describe; exit 0; fi
describe >&2
mkdir -p -- "$cache"
exec "${command[@]}"
