#!/usr/bin/env bash
# Trains on several machines over ssh, started from one of them:
#
#   launchers/hosts.sh n1 n2 -- --config_file accelerate_configs/multi_node_ddp.yaml --num_processes 16 recipes/mnist.py
#
# The first host is machine 0; its name must also work on the other hosts. The arguments after -- go to accelerate
# launch. Each machine needs the checkout, the environment and the data at the same path, and --output_dir on a file
# system that all machines share. Each line of output begins with its host. Ctrl-C saves and stops the run on all hosts.
# If one host fails, the others stop too. The same command with --resume_from_checkpoint latest resumes the run.
# Exit code: that of the first host that failed; 75 if the run was stopped and has saved.
#
# Without ssh, type this on each machine, with its own rank:
#
#   python launchers/node.py --num_machines 2 --machine_rank 0 --main_process_ip n1 -- --config_file ...
#
# Variables, with defaults: SSH (ssh -o BatchMode=yes -o ServerAliveInterval=30), PYTHON (python3 of this shell), PORT
# of machine 0 (29500), TIMEOUT in seconds to wait for all machines (300). Exported variables that begin with CUDA_,
# NCCL_, GLOO_, OMP_, TORCH_, HF_, WANDB_ or TRACKIO_ are set on all hosts.
set -euo pipefail

SSH=${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}
PYTHON=${PYTHON:-$(command -v python3)}
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if [ ${#hosts[@]} -eq 0 ] || [ $# -lt 2 ]; then
    echo "error: run launchers/hosts.sh HOST HOST ... -- --config_file accelerate_configs/multi_node_ddp.yaml --num_processes 16 recipes/mnist.py" >&2
    exit 2
fi
shift

variables=("PATH=$(dirname "$PYTHON"):$PATH")
for name in $(compgen -e | grep -E '^(CUDA|NCCL|GLOO|OMP|TORCH|HF|WANDB|TRACKIO)_' || true); do
    variables+=("$name=${!name}")
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The run continues while this script holds the pipe open: node.py stops when its standard input ends.
mkfifo "$folder/go"
exec 3<>"$folder/go"
for rank in "${!hosts[@]}"; do
    command=(env "${variables[@]}" "$PYTHON" launchers/node.py --num_machines ${#hosts[@]} --machine_rank "$rank"
        --main_process_ip "${hosts[0]#*@}" --main_process_port "${PORT:-29500}" --timeout "${TIMEOUT:-300}" --ends_with_stdin -- "$@")
    {
        set +e
        trap '' INT # Ctrl-C also reaches ssh, which would end before the save
        exec 3>&-
        $SSH "${hosts[$rank]}" "cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}")" <"$folder/go" 2>&1 |
            sed -u "s/^/[${hosts[$rank]}] /"
        echo "${PIPESTATUS[0]}" >"$folder/code_$rank"
    } &
done
exec 3>"$folder/go"
trap 'exec 3>&-' INT TERM HUP

code=0
for ((num_ended = 0; num_ended < ${#hosts[@]}; )); do
    sleep 0.5 || true # Ctrl-C also ends sleep
    num_ended=0
    for rank in "${!hosts[@]}"; do
        if [ -s "$folder/code_$rank" ]; then
            num_ended=$((num_ended + 1))
            [ $code -ne 0 ] || code=$(<"$folder/code_$rank")
        fi
    done
    [ $code -eq 0 ] || exec 3>&-
done
exit "$code"
