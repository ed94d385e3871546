#!/usr/bin/env bash
# Creates a small cluster of network namespaces and shows what Ballast does in it. It checks what it shows, and fails if a
# check fails. `cargo xtask demo` calls it.
#
# demo.sh BALLAST MANIFEST [keep]     keep: the cluster stays at the end
# demo.sh down                        deletes kept clusters and the remains of interrupted demos
#
# shellcheck disable=SC2016,SC2086  # words of shell and of awk, and lists of words
# shellcheck source=xtask/tools/lab.sh
. "$(dirname "$0")/lab.sh" demo

readonly service=10.96.0.10 service6=fd96::10 pods='redis-0 redis-1 redis-2' connections=300
# The endpoint that is removed and added again.
readonly going=redis-2 going4=10.2.0.12 going6=fd02::12

# --- what it prints: plain text for 80 to 100 columns, with colours on a terminal ---
if { [ -t 1 ] || [ -n "${CLICOLOR_FORCE:-}" ]; } && [ -z "${NO_COLOR:-}" ]; then
    paint() { printf '\033[%sm%s\033[0m' "$1" "$2"; }
else
    paint() { printf %s "$2"; }
fi
title() { printf '\n%s\n' "$(paint 1 "$1")"; }
begin() { step=$1; title "$1. $2"; echo "   $3"; }
typed() { printf '\n   %s %s\n' "$(paint 2 '$')" "$(paint 36 "$1")"; }
seen() { echo "   $(paint 32 ok:) $1"; }
# Prints standard input, with long lines wrapped.
text() {
    local line indent
    while IFS= read -r line; do
        indent='   '
        while [ ${#line} -gt 94 ]; do echo "$indent${line:0:94}"; line=${line:94}; indent='      '; done
        echo "${line:+$indent$line}"
    done
}
# Prints the first $1 lines of standard input.
head_of() {
    local lines
    mapfile -t lines
    printf '%s\n' "${lines[@]:0:$1}" | text
    [ ${#lines[@]} -le "$1" ] || echo "   $(paint 2 "... $((${#lines[@]} - $1)) more lines")"
}
# Shows a command on a machine, runs it, and shows its output, which is then in `out`.
run() {
    typed "$dir/$*"
    out=$("$dir/$1" "${@:2}")
    head_of 24 <<<"$out"
}
holds() { [[ $1 == *"$2"* ]]; }
if [ "$1" = down ]; then clear_up kept; exit; fi
clear_up ''

readonly example=$2 keep=${3:-}
declare -A traffic
begin_lab "$1"

# --- the cluster: two nodes, their pods, and a machine whose sockets no hook sees ---
readonly picture='
  vm 192.168.9.2            node1 172.30.0.1               node2 172.30.0.2
  (its sockets are   ----   ballast             --------   ballast
   seen by no hook)         |- app     10.1.0.9            |- redis-1 10.2.0.11
                            `- redis-0 10.1.0.10           `- redis-2 10.2.0.12
  each of them has an IPv6 address, too: fd09::2, fd01::9, fd01::10, fd02::11, fd02::12'
build() {
    node node1
    node node2
    on node1 <<<"link add eth0 type veth peer name eth0 netns ballast-$$-node2"
    on node1 <<EOF
link set eth0 up
address add 172.30.0.1/24 dev eth0
address add fd30::1/64 dev eth0 nodad
route add 10.2.0.0/24 via 172.30.0.2
route add fd02::/64 via fd30::2
EOF
    on node2 <<EOF
link set eth0 up
address add 172.30.0.2/24 dev eth0
address add fd30::2/64 dev eth0 nodad
route add 10.1.0.0/24 via 172.30.0.1
route add 192.168.9.0/24 via 172.30.0.1
route add fd01::/64 via fd30::1
route add fd09::/64 via fd30::1
EOF
    local name node addresses
    while read -r name node addresses; do
        if [ "$name" = vm ]; then machine vm; else machine "$name" "$node"; fi
        plug "$name" "$node" $addresses
    done <<EOF
vm node1 192.168.9.2 fd09::2
app node1 10.1.0.9 fd01::9
redis-0 node1 10.1.0.10 fd01::10
redis-1 node2 10.2.0.11 fd02::11
redis-2 node2 10.2.0.12 fd02::12
EOF
}
# Starts the redis pods, and stores in each its own name.
start_pods() {
    local pod
    for pod in $pods; do
        "$dir/$pod" redis-server --port 6379 --bind 0.0.0.0 :: --dir "$dir" --save '' --appendonly no \
            --protected-mode no </dev/null >"$dir/$pod.log" 2>&1 &
    done
    for pod in redis-0:10.1.0.10 redis-1:10.2.0.11 redis-2:10.2.0.12; do
        await "${pod%:*} (its log: $dir/${pod%:*}.log)" "$dir/app" redis-cli -h "${pod#*:}" SET whoami "${pod%:*}"
    done
}
# Replaces the manifest atomically: with `$1`, without the endpoints that have one of the addresses.
manifest() {
    awk -v out="$1" -v a="\"$going4\"" -v b="\"$going6\"" '
        /^  - addresses:/ { gone = out && (index($0, a) || index($0, b)); seen = 1 }
        !/^  - addresses:/ && !/^    / { gone = 0 }
        !gone' "$example" >"$dir/redis.new"
    mv "$dir/redis.new" "$dir/manifests/redis.yaml"
}

# --- clients: a redis answers with its name; any other line of their output is a failure ---
ask() {
    local name
    printf 'GET whoami\r\n' >&"$1" && read -r -t 3 name <&"$1" && read -r -t 3 name <&"$1" && echo "$2${name%$'\r'}"
}
once() { ask 3 '' 3<>"/dev/tcp/$1/6379" || echo failed; }
several() { for ((; $2 > sent++; )); do once "$1"; done; }
# Asks without end, by new connections and by one that stays.
endless() {
    exec 4<>"/dev/tcp/$1/6379"
    while :; do
        once "$1"
        ask 4 'held ' || { echo 'failed: the open connection'; exit; }
        sleep 0.002
    done
}
clients=$(declare -f ask once several endless)
start_traffic() {
    local name
    for name in app vm; do
        : >"$dir/traffic-$name"
        "$dir/$name" bash -c "$clients; endless $service" </dev/null >>"$dir/traffic-$name" 2>&1 &
        traffic[$name]=$!
    done
}
stop_traffic() {
    # SIGTERM would interrupt a `connect`, which is a failure for the client.
    kill -KILL "${traffic[@]}"
    { wait "${traffic[@]}" || true; } 2>/dev/null
    cat "$dir/traffic-app" "$dir/traffic-vm" >"$dir/tally"
    none_failed
    held=$(grep -c '^held ' "$dir/tally") || die 'no request was sent on the open connections'
    seen "$(grep -c '^redis-' "$dir/tally") new connections and $held requests on open connections, 0 failed"
}
none_failed() {
    local failed
    failed=$(grep -v '^\(held \)\?redis-[0-2]$' "$dir/tally") || return 0
    die "$(wc -l <<<"$failed") requests failed, the last one: $(tail -n 1 <<<"$failed")"
}
of() { grep -c "^$1\$" "$dir/tally" || true; }
# Prints a bar for each pod, also for a pod without connections.
bars() {
    local pod most=1
    for pod in $pods; do [ "$(of "$pod")" -le $most ] || most=$(of "$pod"); done
    for pod in $pods; do
        printf '   %s  %5d  %s\n' "$pod" "$(of "$pod")" "$(paint 32 "$(printf "%$(($(of "$pod") * 40 / most))s" | tr ' ' '#')")"
    done
    none_failed
}
# Each pod has to get at least a fifth of the connections: its fair share is a third, almost five standard deviations more.
even() {
    local pod all
    all=$(grep -c '^redis-' "$dir/tally") || die 'no connections at all'
    for pod in $pods; do
        [ $(($(of "$pod") * 5)) -ge "$all" ] || die "$pod got only $(of "$pod") of $all connections"
    done
}
# Measures the connections of the next 1.5 s, and prints their spread.
watch() {
    local app vm
    app=$(wc -l <"$dir/traffic-app") vm=$(wc -l <"$dir/traffic-vm")
    sleep 1.5
    # Without a last line that is not complete.
    { tail -n +$((app + 1)) "$dir/traffic-app" | head -n -1; tail -n +$((vm + 1)) "$dir/traffic-vm" | head -n -1; } >"$dir/tally"
    echo "   $1:"
    bars
}
# Waits until both nodes list the endpoint, or with `$1` empty do not list it; `took` is how long this took.
await_endpoint() {
    local start=${EPOCHREALTIME/[.,]/}
    lists() {
        local node list
        for node in node1 node2; do
            list=$("$dir/$node" ballast service list)
            if [ -n "$1" ]; then holds "$list" $going4 && holds "$list" $going6; else ! holds "$list" $going4 && ! holds "$list" $going6; fi || return
        done
    }
    await 'the agents to follow the manifest' lists "$1"
    # An endpoint that has just joined gets a connection only if the others fail, for 2 s.
    [ -z "$1" ] || await "connections to $going" eval "tail -qn 30 '$dir/traffic-app' | grep $going && tail -qn 30 '$dir/traffic-vm' | grep $going"
    took=$(((${EPOCHREALTIME/[.,]/} - start) / 1000))
}

# --- the steps ---
echo '==> create two nodes, pods, and a machine outside the cluster' >&2
build
manifest ''
echo '==> start three redis, and an agent on each node' >&2
start_pods
start_agent node1
start_agent node2
await_agent node1
await_agent node2
answers() { holds " $pods " " $("$dir/$1" timeout 1 redis-cli -h "$2" GET whoami) "; }
for name in app vm; do
    for address in $service $service6; do await "an answer to $name from $address" answers $name $address; done
done

begin 1 'The cluster' 'Two nodes with one agent each, a redis Service with three pods.'
text <<<"$picture"
run node1 ballast service list
for part in $service $service6 10.1.0.10:6379 10.2.0.11:6379 10.2.0.12:6379; do
    holds "$out" $part || die "the list has no $part"
done
seen 'both addresses of the Service have all three pods as endpoints'

begin 2 'Two data paths' \
    "The socket of a pod is translated at connect(); for a machine without Ballast's hooks, each packet is translated."
for name in app vm; do
    for address in $service $service6; do
        run $name redis-cli -h $address GET whoami
        holds " $pods " " $out " || die "'$out' is not a pod of the Service"
    done
done
run node1 ballast flow list
if ! holds "$out" 192.168.9.2 || ! holds "$out" fd09::2; then die 'no flow of the machine vm'; fi
! holds "$out" 10.1.0.9 || die 'a flow of the pod app, whose sockets need none'
seen 'four answers; only the connections of vm are tracked'

begin 3 Spread 'On both paths, each new connection selects a random pod.'
for name in app vm; do
    typed "$dir/$name redis-cli -h $service GET whoami   # $connections times"
    "$dir/$name" bash -c "$clients; several $service $connections" </dev/null >"$dir/tally" 2>&1
    bars
    [ "$(grep -c . "$dir/tally")" = $connections ] || die "only $(grep -c . "$dir/tally") answers"
    even
done
seen "$((2 * connections)) connections, spread over all pods, 0 failed"

begin 4 'An endpoint is removed and added again' \
    'Both clients connect all the time, while redis-2 is removed from the manifest and added again.'
start_traffic
watch before
even
typed "vi $dir/manifests/redis.yaml   # without $going"
manifest out
await_endpoint ''
watch "without $going, $took ms later"
[ "$(of $going)" = 0 ] || die "$going got $(of $going) connections"
[ -s "$dir/tally" ] || die 'no connections at all'
typed "vi $dir/manifests/redis.yaml   # as it was"
manifest ''
echo '   For 2 s, an endpoint that has just joined gets new connections only if the others fail.'
await_endpoint there
watch "with it, $took ms later"
even
stop_traffic

begin 5 'The maps in the kernel' \
    'The maps have BTF types, so bpftool prints them with field names (addresses as bytes).'
# `backends` grows, so it is a map of segments.
for map in services segments/backends_0; do
    path=$dir/bpf-node1/ballast/$map
    typed "bpftool map dump pinned $path"
    # The first element with the port of the Service, and how many more there are: bpftool also prints the empty elements of an array.
    elements=$("$dir/node1" bpftool map dump pinned "$path" | awk -v RS='\n    },' '
        /"port": 6379/ { if (!count++) { sub(/^[[,\n]*/, ""); sub(/\n    }\n]\n*$/, ""); print $0 "\n    }" } }
        END { print count + 0 }')
    [ "$(tail -n 1 <<<"$elements")" -gt 0 ] || die "no element of \`$map\` has the port"
    sed '$d' <<<"$elements" | head_of 24
    [ "$(tail -n 1 <<<"$elements")" = 1 ] || echo "   ... and $(($(tail -n 1 <<<"$elements") - 1)) more like it"
done
seen 'the port of the Service is in the entries of `services` and `backends`'

begin 6 'The agent is killed under traffic' \
    'Programs and maps stay in the kernel; traffic continues without the agent.'
start_traffic
watch before
typed "kill -9 ${agent[node1]}"
end_agent node1 KILL
watch 'without an agent'
even
run node1 ballast service list
typed "$dir/node1 $(agent_words node1 | sed 's/ --/ \\\n         --/g')"
start=${EPOCHREALTIME/[.,]/}
start_agent node1
await_agent node1
watch "with the new agent, ready after $(((${EPOCHREALTIME/[.,]/} - start) / 1000)) ms"
even
stop_traffic

begin 7 Counters 'Statistics as text, for scripts (-o json), and for Prometheus.'
run node1 ballast service show redis
counted=$(sed -n '/^Connections: */{s///p;q}' <<<"$out")
[ "${counted:-0}" -gt $((2 * connections)) ] || die "only ${counted:-no} connections were counted"
run node1 ballast status
typed "$dir/node1 curl -s http://127.0.0.1:10249/metrics | grep ^ballast_service"
"$dir/node1" curl -sf http://127.0.0.1:10249/metrics | grep ^ballast_service | head_of 6
typed "$dir/node1 curl -s http://127.0.0.1:10249/proxyMode"
mode=$("$dir/node1" curl -sf http://127.0.0.1:10249/proxyMode)
text <<<"$mode"
[ "$mode" = ebpf ] || die "/proxyMode is $mode"
seen "$counted connections counted; /proxyMode returns ebpf"

if [ -n "$keep" ]; then
    touch "$dir/kept"
    : >"$dir/started"
    title 'The cluster keeps running. Each machine has a script that runs a command on it:'
    typed "$dir/app redis-cli -h $service GET whoami"
    typed "$dir/vm redis-cli -h $service6 GET whoami"
    typed "$dir/node1 ballast service list -o wide"
    typed "$dir/node1 ballast flow list"
    typed "$dir/node1 ballast status"
    typed "vi $dir/manifests/redis.yaml"
    typed "tail -f $dir/agent-node1.log"
    typed "nsenter --net=/run/netns/ballast-$$-node1 ip route"
    typed 'cargo xtask demo --down   # removes the cluster'
    exit
fi
begin 8 Cleanup \
    '`ballast cleanup` removes everything that the agents put into the kernel; then the cluster is removed.'
for node in node1 node2; do
    end_agent $node TERM
    typed "$dir/$node ballast cleanup --yes"
    out=$("$dir/$node" ballast cleanup --yes)
    head_of 4 <<<"$out"
    holds "$out" removed || die "nothing was removed on $node"
    [ ! -e "$dir/bpf-$node/ballast" ] || die "$dir/bpf-$node/ballast is still there"
    out=$("$dir/$node" ballast cleanup --yes)
    ! holds "$out" removed || die "a second cleanup still removed something: $out"
    out=$("$dir/$node" bpftool cgroup show "$(group $node)")
    [ -z "$out" ] || die "programs are still attached to $(group $node): $out"
done
take_down $$
[ -z "$(namespaces $$)$(groups $$)" ] || die "still there: $(namespaces $$) $(groups $$)"
[ ! -e "$dir" ] || die "still there: $dir"
seen 'no pins, programs, namespaces, cgroups or files of the demo are left'
echo "the demo took $SECONDS s" >&2
