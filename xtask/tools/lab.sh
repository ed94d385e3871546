#!/usr/bin/env bash
# A lab: nodes, pods and other machines as network namespaces of this machine. The scripts beside it source it:
#
# . lab.sh NAME     NAME: of the lab; its files are in ballast-NAME-PID in the folder for temporary files
#
# Everything that it creates is named after the PID, so that it can be removed, also after a crash.
# shellcheck disable=SC2016,SC2086  # words of shell and of awk, and lists of words
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

readonly lab=$1
tmp=${TMPDIR:-/tmp}
readonly dir=$tmp/ballast-$lab-$$
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
[ -n "$cgroups" ] || { echo 'error: no cgroup2 is mounted: `mount -t cgroup2 cgroup2 /sys/fs/cgroup`' >&2; exit 1; }
declare -A agent

die() { echo "error: ${step:+step $step: }$*" >&2; exit 1; }

# Waits up to a minute, which is long only for a busy machine, until a command succeeds.
await() {
    local end=$((SECONDS + 60))
    until "${@:2}" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || die "waited a minute for $1"
        sleep 0.03
    done
}

# --- the place of a lab on this machine ---
start_of() { awk '{ sub(/.*\) /, ""); print $20 }' "/proc/$1/stat" 2>/dev/null || true; }
namespaces() { (cd /run/netns 2>/dev/null && ls) | grep "^ballast-$1-" || true; }
groups() { find "$cgroups" -depth -maxdepth 3 -type d -path "$cgroups/ballast-$lab-$1-*"; }
inhabitants() {
    local name
    for name in $(namespaces "$1"); do ip netns pids "$name"; done
    groups "$1" | sed 's,$,/cgroup.procs,' | xargs -r cat 2>/dev/null || true
}
# Ends the processes of the lab with this PID, all of which were started for it, and removes everything that it created.
take_down() {
    local try name pids
    for try in {1..200}; do
        pids=$(inhabitants "$1")
        [ -n "$pids" ] || break
        case $try in 1) kill $pids ;; 100) kill -KILL $pids ;; esac 2>/dev/null || true
        sleep 0.02
    done
    awk -v below="$tmp/ballast-$lab-$1/" 'index($2, below) == 1 { print $2 }' /proc/self/mounts | while read -r name; do
        # The pins hold programs as long as any copy of the mount exists.
        rm -rf "$name/ballast"
        umount "$name" || true
    done
    for name in $(namespaces "$1"); do ip netns delete "$name" || true; done
    # A cgroup is busy for a moment after its last process has ended.
    for _ in {1..100}; do groups "$1" | xargs -r rmdir 2>/dev/null && break; sleep 0.02; done
    # The removal must not reach into a file system that is still mounted.
    ! grep -q " $tmp/ballast-$lab-$1/" /proc/self/mounts || { echo "error: still mounted in $tmp/ballast-$lab-$1" >&2; return 1; }
    rm -rf "$tmp/ballast-$lab-$1"
}
# Removes what ended labs left behind; `$1`: also kept ones.
clear_up() {
    local place number found=
    for place in "$tmp/ballast-$lab"-*/; do
        number=${place%/} number=${number##*-}
        # Any user can create a folder of this name, but only root can have created a lab.
        [[ $number =~ ^[0-9]+$ && -O $place ]] || continue
        # It still runs, and no other process has its number.
        [ -z "$(start_of "$number")" ] || [ "$(start_of "$number")" != "$(cat "$place/started")" ] || continue
        [ -n "$1" ] || [ ! -e "$place/kept" ] || continue
        echo "removing the lab in ${place%/}" >&2
        take_down "$number"
        found=1
    done
    [ -n "$found" ] || [ -z "$1" ] || echo "no $lab is running" >&2
}
# Begins a lab with this program as `ballast`, and removes the lab at the end of the script, unless it is kept.
begin_lab() {
    mkdir "$dir" "$dir/manifests" "$dir/bin"
    start_of $$ >"$dir/started"
    # A copy: a build must not replace the program that created the maps.
    cp "$1" "$dir/bin/ballast"
    trap '[ -e "$dir/kept" ] || take_down $$' EXIT
    trap 'exit 130' INT TERM HUP
}

# --- machines ---
on() { ip -n "ballast-$$-$1" -batch -; }
group() { echo "$cgroups/ballast-$lab-$$-$1"; }
# Creates the machine $1, and the script that runs a command on it; its processes are in the cgroup of the node $2, if given.
machine() {
    ip netns add "ballast-$$-$1"
    cat >"$dir/$1" <<EOF
#!/bin/sh
# Runs a command as $1 would.
${2:+echo \$\$ > '$(group "$2")/cgroup.procs' || exit}
PATH='$dir/bin':\$PATH:/usr/sbin:/sbin
BALLAST_BPFFS='$dir/bpf-${2:-node1}'
export PATH BALLAST_BPFFS
exec nsenter --net=/run/netns/ballast-$$-$1 "\$@"
EOF
    chmod +x "$dir/$1"
    [ "$1" != "${2:-}" ] || mkdir "$(group "$1")"
    # Enables forwarding, and lets addresses be used at once.
    "$dir/$1" sh -ec 'cd /proc/sys/net
        echo 1 > ipv4/ip_forward
        for family in ipv4 ipv6; do echo 1 > $family/conf/all/forwarding; done
        for which in all default; do
            echo 0 > ipv4/conf/$which/rp_filter
            echo 0 > ipv6/conf/$which/disable_ipv6
            echo 0 > ipv6/conf/$which/accept_dad
        done'
    on "$1" <<<'link set lo up'
}
# Creates a node: a machine with a cgroup and a bpffs.
node() {
    machine "$1" "$1"
    mkdir "$dir/bpf-$1"
    mount -t bpf bpf "$dir/bpf-$1"
}
# Connects the guest $1 with the addresses $3 and $4 to the node $2 with routes, as most CNI plugins do.
plug() {
    on "$2" <<EOF
link add $1 type veth peer name eth0 netns ballast-$$-$1
link set $1 up
address add 169.254.1.1/32 dev $1
address add fe80::1/64 dev $1 nodad
route add $3/32 dev $1
route add $4/128 dev $1
EOF
    on "$1" <<EOF
link set eth0 up
address add $3/32 dev eth0
address add $4/128 dev eth0 nodad
route add 169.254.1.1 dev eth0 scope link
route add default via 169.254.1.1 dev eth0
route add default via fe80::1 dev eth0
EOF
}

# --- agents ---
# The command line of a node's agent. Without an API server, nothing else tells which addresses belong to Services.
agent_words() {
    echo "ballast run --hostname-override $1 --manifests $dir/manifests --cgroup-root $(group "$1")" \
        "--bind-address 172.30.0.${1#node} --service-cidrs 10.96.0.0/16,fd96::/112 ${agent_flags:-}"
}
start_agent() {
    # shellcheck disable=SC2046
    "$dir/$1" $(agent_words "$1") </dev/null >>"$dir/agent-$1.log" 2>&1 &
    agent[$1]=$!
}
is_well() { kill -0 "${agent[$1]}" || exit; "$dir/$1" ballast status; }
await_agent() { (await "the agent of $1" is_well "$1") || die "the agent of $1: $(tail "$dir/agent-$1.log")"; }
end_agent() {
    kill -"$2" "${agent[$1]}"
    { wait "${agent[$1]}" || true; } 2>/dev/null
}
