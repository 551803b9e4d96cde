#!/usr/bin/env bash
# Trains on several machines, from one of them, over ssh:
#
#   launchers/hosts.sh n1 n2 -- --config_file accelerate_configs/multi_node_ddp.yaml --num_processes 16 recipes/mnist.py
#
# The first host is machine 0, whose name must lead to it from the others, too; what follows -- are arguments of
# accelerate launch. The checkout, the environment and the data lie in the same place on each machine, and --output_dir
# on a file system that all share. Each line of output begins with its host. When one host fails, or this script is
# stopped (Ctrl-C), all are stopped; they save first, and the same command with --resume_from_checkpoint latest goes on.
# Exit code: that of the first host that failed; 75 if the run was stopped and has saved.
#
# Without ssh, type on each machine, with its rank, what this script runs there:
#
#   python launchers/node.py --num_machines 2 --machine_rank 0 --main_process_ip n1 -- --config_file ...
#
# Variables: SSH (ssh -o BatchMode=yes -o ServerAliveInterval=30), PYTHON (that of this shell), PORT (29500) of machine 0,
# TIMEOUT (300), seconds to wait for all machines. Exported ones that begin with CUDA_, NCCL_, GLOO_, OMP_, TORCH_, HF_,
# WANDB_ or TRACKIO_ are set on all hosts.
set -euo pipefail

SSH=${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}
PYTHON=${PYTHON:-$(command -v python3)}
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if [ ${#hosts[@]} -eq 0 ] || [ $# -lt 2 ]; then
    echo "error: type launchers/hosts.sh HOST HOST ... -- --config_file accelerate_configs/multi_node_ddp.yaml --num_processes 16 recipes/mnist.py" >&2
    exit 2
fi
shift

variables=("PATH=$(dirname "$PYTHON"):$PATH")
for name in $(compgen -e | grep -E '^(CUDA|NCCL|GLOO|OMP|TORCH|HF|WANDB|TRACKIO)_' || true); do
    variables+=("$name=${!name}")
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# While this script holds it open the machines go on: node.py stops there when its input ends.
mkfifo "$folder/go"
exec 3<>"$folder/go"
for rank in "${!hosts[@]}"; do
    command=(env "${variables[@]}" "$PYTHON" launchers/node.py --num_machines ${#hosts[@]} --machine_rank "$rank"
        --main_process_ip "${hosts[0]#*@}" --main_process_port "${PORT:-29500}" --timeout "${TIMEOUT:-300}" --ends_with_stdin -- "$@")
    {
        set +e
        trap '' INT # Ctrl-C reaches ssh, too, which would not wait for the save
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
    sleep 0.5 || true # which Ctrl-C ends, too
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
