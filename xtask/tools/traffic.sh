#!/usr/bin/env bash
# Runs real clients and servers through Ballast, and real neighbours beside it, on two nodes made of network namespaces. Every
# request that fails is a failure. `cargo xtask test traffic` calls it, with the folder of Python packages in
# TRAFFIC_PYTHON, and kube-proxy, an API server and etcd in the variables of the tests.
#
# traffic.sh BALLAST [PART...]     without a part: all
# traffic.sh down                  removes what interrupted runs left behind
# shellcheck disable=SC2016,SC2086,SC2317  # words of awk, lists of words, and functions that are called by a name in a variable
# shellcheck source=xtask/tools/lab.sh
. "$(dirname "$0")/lab.sh" traffic

readonly all='http algorithms redis dns iperf3 grpc quic sip haproxy keepalived nodelocal firewall firewalld kube-proxy'
if [ "$1" = down ]; then clear_up kept; exit; fi
clear_up ''
readonly user=172.30.0.9 script=$PWD/xtask/tools/traffic.py
agent_flags='--accept-dsr --tenant-annotations all'
# The agents would report them as unknown settings.
export -n BALLAST_KUBE_PROXY BALLAST_KUBE_APISERVER BALLAST_ETCD BALLAST_OTLP_RECEIVER

# --- the network: a bridge with two nodes and two machines outside; the guest's sockets are seen by no hook ---
#
#   user .9   lb .8              node1 .1                         node2 .2
#     |         |                  |- app   10.1.0.9               |- s2 10.2.0.12
#     `---------+-- 172.30.0.0/24 -+- s1    10.1.0.11    ----------+- s3 10.2.0.13
#                                  `- guest 192.168.9.2
declare -A address=([s1]=10.1.0.11 [s2]=10.2.0.12 [s3]=10.2.0.13) address6=([s1]=fd01::11 [s2]=fd02::12 [s3]=fd02::13)
declare -A home=([s1]=node1 [s2]=node2 [s3]=node2)
wire() {
    on lan <<EOT
link add $1 type veth peer name eth0 netns ballast-$$-$1
link set $1 master br0 up
EOT
    on "$1" <<EOT
link set eth0 up
address add 172.30.0.$2/24 dev eth0
address add fd30::$2/64 dev eth0 nodad
route add default via 172.30.0.254
EOT
}
routes() { # MACHINE GATEWAY RANGES
    local range
    for range in $3; do
        case $range in *:*) echo "route add $range via fd30::$2" ;; *) echo "route add $range via 172.30.0.$2" ;; esac
    done | on "$1"
}
build() {
    local name node addresses
    for name in lan user lb; do machine $name; done
    for name in node1 node2; do node $name; done
    on lan <<EOT
link add br0 type bridge
link set br0 up
address add 172.30.0.254/24 dev br0
address add fd30::254/64 dev br0 nodad
EOT
    wire node1 1
    wire node2 2
    wire lb 8
    wire user 9
    for name in user lb lan; do
        routes $name 1 '10.1.0.0/24 fd01::/64 203.0.113.0/24 fd99::/64'
        routes $name 2 '10.2.0.0/24 fd02::/64'
    done
    routes node1 2 '10.2.0.0/24 fd02::/64'
    routes node2 1 '10.1.0.0/24 fd01::/64 192.168.9.0/24 fd09::/64'
    while read -r name node addresses; do
        if [ "$name" = guest ]; then machine guest; else machine "$name" "$node"; fi
        plug "$name" "$node" $addresses
    done <<EOT
guest node1 192.168.9.2 fd09::2
app node1 10.1.0.9 fd01::9
s1 node1 ${address[s1]} ${address6[s1]}
s2 node2 ${address[s2]} ${address6[s2]}
s3 node2 ${address[s3]} ${address6[s3]}
EOT
}

# --- Services: number N has 10.96.0.N, fd96::N, 203.0.113.N and fd99::N ---
declare -A number=() ports=()
node_port() { # NUMBER PORT
    local index=0 port
    for port in 80 6379 53 5201 50051 4433 5060 8080; do
        [ "$port" != "$2" ] || { echo $((30000 + 10 * $1 + index)); return; }
        index=$((index + 1))
    done
    die "no node port for $2"
}
# Writes a Service: NAME NUMBER PORTS ENDPOINTS [ANNOTATION: VALUE] [LINE OF THE SPEC]. A port is like TCP/80.
service() {
    local port
    number[$1]=$2 ports[$1]=$3
    {
        cat <<EOT
apiVersion: v1
kind: Service
metadata:
  name: $1
  namespace: default
  annotations: {${5:-}}
spec:
  type: LoadBalancer
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.$2
  clusterIPs: [10.96.0.$2, "fd96::$2"]
  ${6:-}
  ports:
EOT
        for port in $3; do
            echo "    - {name: ${port,,}, protocol: ${port%/*}, port: ${port#*/}, nodePort: $(node_port $2 ${port#*/})}" | tr '/' '-'
        done
        echo "status: {loadBalancer: {ingress: [{ip: ${vip:-203.0.113.$2}}, {ip: \"fd99::$2\"}]}}"
    } >"$dir/new"
    mv "$dir/new" "$dir/manifests/$1.yaml"
    endpoints "$1" "$4"
}
# Replaces the endpoints of a Service; `s2-`: s2 is terminating.
endpoints() {
    local family port pod condition
    for family in 4 6; do
        {
            cat <<EOT
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: $1-$family, namespace: default, labels: {kubernetes.io/service-name: $1}}
addressType: IPv$family
ports:
EOT
            for port in ${ports[$1]}; do
                echo "  - {name: ${port,,}, protocol: ${port%/*}, port: ${port#*/}}" | tr '/' '-'
            done
            echo "endpoints:"
            for pod in $2; do
                case $pod in
                *-) condition='{ready: false, serving: true, terminating: true}' ;;
                *) condition='{ready: true, serving: true, terminating: false}' ;;
                esac
                pod=${pod%-}
                if [ $family = 4 ]; then port=${address[$pod]}; else port=${address6[$pod]}; fi
                echo "  - {addresses: [\"$port\"], nodeName: ${home[$pod]}, conditions: $condition}"
            done
        } >"$dir/new"
        mv "$dir/new" "$dir/manifests/$1-$family.yaml"
    done
}
services() {
    local algorithm n=41
    service one 31 'TCP/80 TCP/6379 UDP/53 TCP/53 TCP/5201 UDP/5201' s2
    service web 32 'TCP/80 TCP/6379 TCP/53 TCP/50051' 's1 s2 s3'
    # s3 comes and goes: a datagram that it has not answered yet is lost, so it gets none.
    service udp 33 'UDP/53 TCP/53 UDP/4433 UDP/5060' 's1 s2 s3' "ballast.io/weights: '10.2.0.13=0, fd02::13=0'"
    service local 34 'TCP/80 TCP/8080' 's1 s2' '' $'externalTrafficPolicy: Local\n  healthCheckNodePort: 32004'
    service dsr 35 'TCP/80 TCP/6379 UDP/53' 's2 s3' 'ballast.io/forwarding-mode: dsr'
    vip=172.30.0.100 service vip 36 'TCP/80 TCP/6379' 's1 s2 s3' 'ballast.io/forwarding-mode: dsr'
    service upstream 37 'UDP/53 TCP/53' 's1 s2 s3'
    for algorithm in $algorithms; do
        service $algorithm $n TCP/80 's1 s2 s3' "ballast.io/algorithm: $algorithm"
        n=$((n + 1))
    done
    for n in 1 2; do
        cat >"$dir/manifests/node$n.yaml" <<EOT
apiVersion: v1
kind: Node
metadata: {name: node$n}
spec: {podCIDR: 10.$n.0.0/24, podCIDRs: [10.$n.0.0/24, "fd0$n::/64"]}
status: {addresses: [{type: InternalIP, address: 172.30.0.$n}, {type: InternalIP, address: "fd30::$n"}]}
EOT
    done
}
readonly algorithms='random rr wrr sh dh mh lc wlc sed nq latency'
# Sets `host` and `port` of a way to a Service: SERVICE WAY PORT. Without a proxy, every way leads to the endpoint.
at() {
    local n=${number[$1]}
    port=$3
    case $2 in
    cluster4) host=10.96.0.$n ;;
    cluster6) host=fd96::$n ;;
    balancer4) host=203.0.113.$n ;;
    balancer6) host=fd99::$n ;;
    node4) host=172.30.0.1 port=$(node_port $n $3) ;;
    vip) host=172.30.0.100 ;;
    node6) host=fd30::1 port=$(node_port $n $3) ;;
    *4*) host=${address[${2%4}]} ;;
    *) host=${address6[${2%6}]} ;;
    esac
    url=http://$host:$port/
    [[ $host != *:* ]] || url="http://[$host]:$port/"
}

# --- servers ---
serve() { # MACHINE LOG COMMAND
    POD=$1 "$dir/$1" "${@:3}" </dev/null >>"$dir/$1-$2.log" 2>&1 &
}
start_nginx() {
    local pod=$1
    cat >"$dir/nginx-$pod.conf" <<EOT
daemon off; worker_processes 1; pid $dir/nginx-$pod.pid; error_log stderr;
events { worker_connections 4096; }
http {
    access_log off; keepalive_requests 10000000;
    server { listen ${address[$pod]}:80 backlog=4096; listen [${address6[$pod]}]:80; return 200 "$pod \$remote_addr\n"; }
    server { listen ${address[$pod]}:8080 proxy_protocol; return 200 "$pod \$proxy_protocol_addr by \$remote_addr\n"; }
}
EOT
    serve $pod nginx nginx -p "$dir" -e stderr -c "$dir/nginx-$pod.conf"
}
# Writes the settings of an unbound: NAME ADDRESSES [MORE].
unbound_conf() {
    local a b='' zone
    for a in {1..12}; do b+="\"$(printf '%0240d' $a)\" "; done
    zone="    local-zone: \"test.\" static
    local-data: \"a.test. A 192.0.2.1\"
    local-data: 'big.test. TXT $b'"
    cat <<EOT
server:
    chroot: ""
    username: ""
    pidfile: ""
    directory: "$dir"
    use-syslog: no
    do-daemonize: no
    num-threads: 1
    module-config: "iterator"
    access-control: 0.0.0.0/0 allow
    access-control: ::/0 allow
    identity: "$1"
    do-not-query-localhost: no
    max-udp-size: 4096
    edns-buffer-size: 4096
$(for a in $2; do echo "    interface: $a"; done)
${3:-$zone}
remote-control:
    control-enable: no
EOT
}
start_servers() {
    local pod
    echo 'a.test A' >"$dir/queries"
    echo 'big.test TXT' >"$dir/queries-big"
    openssl req -x509 -newkey rsa:2048 -nodes -keyout "$dir/key.pem" -out "$dir/cert.pem" -days 2 -subj /CN=traffic 2>/dev/null
    for pod in s1 s2 s3; do
        start_nginx $pod
        serve $pod redis redis-server --port 6379 --bind 0.0.0.0 :: --dir "$dir" --save '' --appendonly no --protected-mode no
        unbound_conf $pod "${address[$pod]} ${address6[$pod]}" >"$dir/unbound-$pod.conf"
        serve $pod unbound unbound -d -c "$dir/unbound-$pod.conf"
    done
    for pod in s1 s2 s3; do
        await "nginx on $pod" "$dir/node1" curl -sf "http://${address[$pod]}/"
        await "redis on $pod" "$dir/node1" redis-cli -h "${address[$pod]}" PING
        await "unbound on $pod" "$dir/node1" dig +short +time=1 +tries=1 "@${address[$pod]}" a.test
    done
}
python() { PYTHONPATH=$TRAFFIC_PYTHON "$dir/$1" python3 "$script" "${@:2}"; } # MACHINE WORDS...
serve_python() { PYTHONPATH=$TRAFFIC_PYTHON serve $1 $2 python3 "$script" "${@:3}"; } # MACHINE LOG WORDS...

# --- clients, called with MACHINE SERVICE WAY [MORE]: each prints requests, failures, and two times in ms or other figures ---
http-new() { at $2 $3 80; run_ab $1 $url ${4:-2000}; }
run_ab() { # a connection for each request
    "$dir/$1" ab -q -l -r -s 10 -n $3 -c 8 -e "$dir/ab-$1.csv" $2 >"$dir/ab-$1" 2>&1 || true
    awk -F'[ :,]+' -v n=$3 '/^Complete requests/ { done = $3 } /^(Failed requests|Non-2xx responses)/ { failed += $3 }
        $1 == 50 { p50 = $2 } $1 == 99 { p99 = $2 } END { print n, failed + n - done, p50, p99 }' "$dir/ab-$1" "$dir/ab-$1.csv"
}
http-kept() {
    at $2 $3 80
    "$dir/$1" wrk -t1 -c8 -d${4:-1}s --timeout 10s --latency $url >"$dir/wrk-$1" 2>&1 || true
    awk 'function ms(t) { return t ~ /us$/ ? t / 1000 : t ~ /ms$/ ? t + 0 : t * 1000 }
        /requests in/ { sent = $1 } /Socket errors/ { gsub(",", ""); failed += $4 + $6 + $8 + $10 } /Non-2xx/ { failed += $NF }
        $1 == "50%" { p50 = ms($2) } $1 == "99%" { p99 = ms($2) } END { print sent + 0, failed + !sent, p50, p99 }' "$dir/wrk-$1"
}
redis-new() { redis $1 $2 $3 ${4:-5000} 0; }
redis-kept() { redis $1 $2 $3 ${4:-50000} 1; }
redis() {
    local status=0
    at $2 $3 6379
    "$dir/$1" redis-benchmark -h $host -p $port -c 8 -n $4 -k $5 -t get --csv >"$dir/redis-$1" 2>&1 || status=1
    awk -F'[",]+' -v n=$4 -v failed=$status '/[Ee]rror/ { failed = 1 } $2 == "GET" { p50 = $6; p99 = $8 }
        END { print n, failed + !p50, p50, p99 }' "$dir/redis-$1"
}
dns() { run_dnsperf $1 $2 $3 "${4:-2}" udp queries; }
dns-tcp() { run_dnsperf $1 $2 $3 "${4:-2}" tcp queries; }
dns-fragments() { run_dnsperf $1 $2 $3 "${4:-1}" udp queries-big; }
run_dnsperf() { # instead of percentiles: mean and maximum
    at $2 $3 53
    "$dir/$1" dnsperf -s $host -p $port -d "$dir/$6" -m $5 -e -l $4 -c 8 -t 5 >"$dir/dns-$1" 2>&1 || true
    awk '/Queries sent/ { sent = $3 } /Queries lost/ { lost = $3 } /Response codes/ && !/NOERROR [0-9]+ \(100/ { lost++ }
        /Average Latency/ { gsub("[,)]", ""); mean = 1000 * $4; max = 1000 * $8 }
        END { print sent + 0, lost + !sent, mean "_mean", max "_max" }' "$dir/dns-$1"
}
iperf() { # also prints how many segments were sent again
    at $2 $3 5201
    "$dir/$1" iperf3 -c $host -p $port -J "${@:4}" >"$dir/iperf-$1" 2>/dev/null || true
    python3 - "$dir/iperf-$1" <<'EOT'
import json, sys
try:
    end = json.load(open(sys.argv[1]))["end"]
    if "retransmits" in end.get("sum_sent", {}):
        sent, received = end["sum_sent"], end["sum_received"]
        print(received["bytes"] // 1448, 0, f'{received["bits_per_second"] / 1e9:.2f}_Gbit/s', f'{sent["retransmits"]}_again')
    else:
        total = end["sum"]
        print(total["packets"], total["lost_packets"], f'{total["bits_per_second"] / 1e6:.0f}_Mbit/s', "")
except (KeyError, ValueError):
    print(1, 1)
EOT
}
tcp() { iperf $1 $2 $3 -t ${4:-1}; }
tcp-back() { iperf $1 $2 $3 -t ${4:-1} -R; }
udp() { iperf $1 $2 $3 -t ${4:-1} -u -b 20M -l 1200; }
udp-fragments() { iperf $1 $2 $3 -t ${4:-1} -u -b 20M -l 8000; }
grpc() {
    at $2 $3 50051
    [[ $host != *:* ]] || host=[$host]
    python $1 grpc-client $host:$port ${4:-10} 8 2>>"$dir/grpc-$1.err"
}
quic() {
    at $2 $3 4433
    python $1 quic-client $host $port ${4:-10} 6 2>>"$dir/quic-$1.err"
}
sip() { # 400 calls of 3 s
    local own
    case $1 in app) own=10.1.0.9 ;; user) own=$user ;; *) own=172.30.0.8 ;; esac
    at $2 $3 5060
    (cd "$dir" && "./$1" sipp -sn uac $host:$port -i $own -p 5080 -m 400 -r 100 -d 3000 -l 5000 -nostdin \
        -trace_stat -stf "$dir/sip-$1.csv" -timeout 60 >"$dir/sip-$1" 2>&1) || true
    awk -F';' 'NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i } END { good = $column["SuccessfulCall(C)"]
        print 400, 400 - good, "", $column["Retransmissions(C)"] "_again" }' "$dir/sip-$1.csv"
}

# --- results ---
# Runs a client, and prints its row: CLIENT MACHINE SERVICE WAY [MORE].
row() {
    local before sent failed one two
    before=$(syns_again $2)
    read -r sent failed one two <<<"$("$@")"
    printf '| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n' $part "$1" $2 "$3 $4" "$sent" "$failed" \
        $(($(syns_again $2) - before)) "${one//_/ }" "${two//_/ }"
    if [ "${failed:-1}" != 0 ]; then echo "$part: $*: ${failed:-all} of $sent failed" >>"$dir/bad"; fi
}
# Prints how many SYNs a machine has retransmitted.
syns_again() { "$dir/$1" awk '/^TcpExt/ { for (i = 1; i <= NF; i++) if ($i == "TCPSynRetrans") at = i; value = $at } END { print value }' /proc/net/netstat; }
# Runs the clients of standard input, one after the other; `& `: at the same time as the next one.
rows() {
    local lines line pids=()
    mapfile -t lines
    for line in "${lines[@]}"; do
        case $line in '& '*) row ${line#& } & pids+=($!) ;; *) row $line ;; esac
    done
    # Not `wait` alone: servers and agents are children, too.
    [ ${#pids[@]} = 0 ] || wait "${pids[@]}"
}
# Runs the clients of standard input, while endpoints change and agents are killed.
rows_disturbed() {
    local text load round=0 name
    text=$(cat)
    rows <<<"$text" &
    load=$!
    while kill -0 $load 2>/dev/null; do
        for name in web udp $algorithms; do endpoints $name 's1 s2'; done
        sleep 0.3
        for name in web udp $algorithms; do endpoints $name 's1 s2 s3'; done
        sleep 0.7
        round=$((round + 1))
        case $((round % 4)) in
        1) restart node1 ;;
        3) restart node2 ;;
        0) sleep 2.5 ;; # s3 gets connections only then
        esac
    done
    wait $load
}
restart() {
    end_agent $1 KILL
    start_agent $1
    await_agent $1
}
# Checks that a command prints only lines that match, 30 times: WHAT PATTERN COMMAND.
always() {
    local text
    text=$(for _ in {1..30}; do "${@:3}" 2>&1 || echo failed; done)
    if ! grep -qvE "^($2)\$" <<<"$text"; then
        printf '| %s | %s | | | 30 | 0 | | | |\n' $part "$1"
    else
        echo "$part: $1: expected $2, got: $(sort <<<"$text" | uniq -c | head -5)" >>"$dir/bad"
    fi
}
# Prints the server's name and the address that it sees: MACHINE SERVICE WAY.
seen_by() { at $2 $3 80; "$dir/$1" curl -s -m 5 $url; }

# --- parts ---
part_http() {
    local way
    for way in cluster4 cluster6; do
        rows <<EOT
http-new app one $way
http-kept app one $way
http-new node1 one $way
http-kept node1 one $way
http-new guest one $way
http-kept guest one $way
EOT
    done
    for way in node4 node6 balancer4 balancer6; do
        rows <<EOT
http-new user one $way
http-kept user one $way
EOT
    done
    always 'servers see the pod' 's[123] 10\.1\.0\.9' seen_by app web cluster4
    always 'servers see the guest' 's[123] 192\.168\.9\.2' seen_by guest web cluster4
    always 'policy Cluster: servers see the node' 's1 169\.254\.1\.1|s[23] 172\.30\.0\.1' seen_by user web node4
    for way in node4 balancer4; do
        always "policy Local, $way: the server sees the user" "s1 $user" seen_by user local $way
        always "DSR, $way: servers see the user" "s[23] $user" seen_by user dsr $way
    done
}
part_algorithms() {
    local algorithm
    # Not a pipe: the agents that are started anew have to be known to this shell.
    rows_disturbed < <(for algorithm in $algorithms; do
        echo "http-new user $algorithm node4 1000"
        echo "http-kept user $algorithm balancer6"
        echo "http-new app $algorithm cluster4 1000"
    done)
}
part_redis() {
    local way
    for way in 'app one cluster4' 'guest one cluster6' 'user one node4' 'user one balancer6'; do
        echo "redis-new $way"
        echo "redis-kept $way"
    done | rows
    rows_disturbed <<EOT
redis-new app web cluster4
redis-new guest web cluster6
redis-new user web node4
redis-kept user web balancer4 200000
redis-kept user dsr node4 200000
EOT
}
part_dns() {
    local way
    for way in 'app one cluster4' 'guest one cluster4' 'user one node4' 'user one balancer6'; do
        echo "dns $way 1"
        echo "dns-fragments $way"
    done | rows
    rows_disturbed <<EOT
dns app udp cluster4 3
dns guest udp cluster6 3
dns user udp node4 3
dns-tcp user web balancer4 3
EOT
}
part_iperf3() {
    local way client
    serve s2 iperf3 iperf3 -s --forceflush
    await 'iperf3' grep -q listening "$dir/s2-iperf3.log"
    for way in 's24' 'node4' 'balancer6'; do
        for client in tcp tcp-back udp udp-fragments; do echo "$client user one $way"; done
    done | rows
    rows_disturbed <<EOT
tcp user one node4 4
tcp-back guest one cluster6 3
udp-fragments app one cluster4 2
udp-fragments guest one cluster4 4
udp-fragments user one node6 2
EOT
}
part_grpc() {
    local pod
    for pod in s1 s2 s3; do serve_python $pod grpc grpc-server "${address[$pod]}" "[${address6[$pod]}]"; done
    for pod in s1 s2 s3; do await "gRPC on $pod" eval "python app grpc-client ${address[$pod]}:50051 0.1 1 | grep -q ' 0 '"; done
    rows_disturbed <<EOT
& grpc app web cluster4
& grpc guest web cluster6
grpc user web node6
EOT
}
part_quic() {
    local pod
    for pod in s1 s2 s3; do
        serve_python $pod quic quic-server "${address[$pod]}" "$dir/cert.pem" "$dir/key.pem"
        serve_python $pod quic6 quic-server "${address6[$pod]}" "$dir/cert.pem" "$dir/key.pem"
    done
    for pod in s1 s2 s3; do await "QUIC on $pod" eval "python app quic-client ${address[$pod]} 4433 0.1 1 | grep -q ' 0 '"; done
    rows_disturbed <<EOT
& quic app udp cluster4
& quic guest udp cluster6
quic user udp node4
EOT
}
part_sip() {
    local pod
    for pod in s1 s2; do serve $pod sip sipp -sn uas -i "${address[$pod]}" -p 5060 -nostdin; done
    rows_disturbed <<EOT
& sip app udp cluster4
& sip lb udp node4
sip user udp balancer4
EOT
}
# A load balancer outside with the PROXY protocol, before nginx (s1) and HAProxy (s2) as ingress with policy Local; and in TCP
# mode before node ports.
part_haproxy() {
    local load limits='timeout connect 5s
    timeout client 1m
    timeout server 1m'
    cat >"$dir/haproxy-s2.cfg" <<EOT
defaults
    mode http
    $limits
frontend ingress
    bind ${address[s2]}:8080 accept-proxy
    http-request return status 200 content-type text/plain lf-string "s2 %[src] by %[fc_src]\n"
EOT
    cat >"$dir/haproxy-lb.cfg" <<EOT
defaults
    mode tcp
    $limits
    option redispatch
backend ingress
    option httpchk
    default-server check port 32004 inter 200 fall 2 rise 2 send-proxy-v2
    server node1 172.30.0.1:$(node_port 34 8080)
    server node2 172.30.0.2:$(node_port 34 8080)
backend servers
    default-server check inter 200
    server node1 172.30.0.1:$(node_port 32 80)
    server node2 172.30.0.2:$(node_port 32 80)
frontend proxied
    bind 172.30.0.8:8080
    default_backend ingress
frontend plain
    bind 172.30.0.8:80
    default_backend servers
EOT
    end_served nginx-s2.conf
    await 'the end of nginx on s2' eval "! '$dir/node2' curl -s http://${address[s2]}:8080/"
    serve s2 haproxy haproxy -db -f "$dir/haproxy-s2.cfg"
    serve lb haproxy haproxy -db -f "$dir/haproxy-lb.cfg"
    await 'HAProxy' "$dir/user" curl -sf http://172.30.0.8:8080/
    sleep 1
    always 'PROXY protocol: ingresses see the user, and the load balancer' "s[12] $user by 172\.30\.0\.8" \
        "$dir/user" curl -s http://172.30.0.8:8080/
    through() { run_ab $1 http://172.30.0.8:$4/ 8000; }
    row through user local PROXY 8080 &
    load=$!
    while kill -0 $load 2>/dev/null; do
        endpoints local 's1 s2-'
        sleep 1
        endpoints local s1
        sleep 0.5
        endpoints local 's1 s2'
        sleep 2
    done
    wait $load
    end_served haproxy-s2.cfg
    start_nginx s2
    await 'nginx on s2' "$dir/node2" curl -sf http://${address[s2]}/
    rows_disturbed <<<'through user web TCP 80'
}
# Ends the processes of this lab whose command line has a text.
end_served() {
    local pid
    for pid in $(inhabitants $$); do
        if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "$1"; then kill $pid; fi
    done
}
# keepalived moves the address of a Service between the nodes; conntrackd copies netfilter's entries from one to the other.
part_keepalived() {
    local load n
    for n in 1 2; do
        cat >"$dir/keepalived-$n.conf" <<EOT
vrrp_instance vip {
    state BACKUP
    interface eth0
    virtual_router_id 7
    priority $((200 - n))
    advert_int 0.5
    virtual_ipaddress { 172.30.0.100/32 dev eth0 }
}
EOT
        cat >"$dir/conntrackd-$n.conf" <<EOT
Sync {
    Mode FTFW {
    }
    UDP {
        IPv4_address 172.30.0.$n
        IPv4_Destination_Address 172.30.0.$((3 - n))
        Port 3780
        Interface eth0
    }
}
General {
    LockFile $dir/conntrackd-$n.lock
    UNIX {
        Path $dir/conntrackd-$n.ctl
    }
}
EOT
        keepalived $n
        serve node$n conntrackd conntrackd -C "$dir/conntrackd-$n.conf"
        # netfilter tracks connections only for rules that ask for it.
        "$dir/node$n" nft 'add table inet watch; add chain inet watch c { type filter hook prerouting priority 0; }; add rule inet watch c ct state new counter'
    done
    await 'the address' "$dir/user" curl -sf http://172.30.0.100/
    rows <<EOT &
& http-kept user vip vip 10
http-new user vip vip 10000
EOT
    load=$!
    sleep 2
    end_served keepalived-1.conf
    await 'node2 to get the address' has_vip node2
    sleep 2
    keepalived 1
    await 'node1 to get the address' has_vip node1
    wait $load
    for n in 1 2; do
        echo "node$n: $("$dir/node$n" conntrackd -C "$dir/conntrackd-$n.conf" -s 2>&1 | awk '/cache external/ { seen = 1 } seen && /current active/ { print "conntrackd knows", $NF, "connections of the other node"; exit }')"
        "$dir/node$n" nft delete table inet watch
    done
    end_served keepalived
    end_served conntrackd
}
has_vip() { "$dir/$1" ip -4 address show dev eth0 | grep -q 172.30.0.100; }
keepalived() {
    serve node$1 keepalived keepalived -n -l -P -f "$dir/keepalived-$1.conf" -p "$dir/keepalived-$1.pid" -r "$dir/vrrp-$1.pid"
}
# NodeLocal DNSCache's scheme: the cache of node1 has the cluster address of the DNS Service.
part_nodelocal() {
    identity() { "$dir/$1" dig +short +time=1 +tries=1 CH TXT id.server "@$2" -p ${3:-53}; }
    on node1 <<EOT
link add nodelocaldns type bridge
link set nodelocaldns up
address add 169.254.20.10/32 dev nodelocaldns
address add 10.96.0.33/32 dev nodelocaldns
EOT
    unbound_conf cache '169.254.20.10 10.96.0.33' "    local-zone: test. nodefault
forward-zone:
    name: .
    forward-addr: 10.96.0.37
    forward-tcp-upstream: yes" >"$dir/unbound-cache.conf"
    "$dir/node1" nft -f - <<EOT
table inet cache {
    set own { type ipv4_addr; elements = { 169.254.20.10, 10.96.0.33 } }
    chain in { type filter hook prerouting priority raw; ip daddr @own udp dport 53 notrack; ip daddr @own tcp dport 53 notrack; }
    chain out { type filter hook output priority raw; ip saddr @own udp sport 53 notrack; ip saddr @own tcp sport 53 notrack; ip daddr @own udp dport 53 notrack; ip daddr @own tcp dport 53 notrack; }
}
EOT
    serve node1 cache unbound -d -c "$dir/unbound-cache.conf"
    await 'the cache' eval "identity app 169.254.20.10 | grep -q cache"
    await 'the cluster address to be the cache' eval "identity app 10.96.0.33 | grep -q cache"
    always 'the cluster address leads pods to the cache' '"cache"' identity app 10.96.0.33
    always 'on another node it leads to the Service' '"s[12]"' identity s3 10.96.0.33
    at udp node4 53
    always 'the node port leads to the Service' '"s[12]"' identity user $host $port
    rows_disturbed <<EOT
dns app udp cluster4 4
dns-tcp app udp cluster4
EOT
    on node1 <<<'link delete nodelocaldns'
    end_served unbound-cache.conf
    "$dir/node1" nft delete table inet cache
    await 'the Service' eval "identity app 10.96.0.33 | grep -q s"
    always 'without the device, the address leads to the Service' '"s[12]"' identity app 10.96.0.33
    rows <<<'dns app udp cluster4'
}
# Clients on each way, while endpoints and agents change.
behind_a_firewall() {
    local way
    rows_disturbed < <(
        for way in 'app web cluster4' 'app web cluster6' 'node1 web cluster4' 'guest web cluster4' 'user web node4' 'user web node6' \
            'user web balancer4'; do
            echo "http-new $way 1000"
        done
        for way in 'app web cluster4' 'user web node4' 'user dsr node4'; do echo "http-kept $way"; done
        for way in 'app udp cluster4' 'user udp node4'; do echo "dns $way 1"; done
        echo 'dns-fragments user udp node4'
    )
    always 'policy Local: the server sees the user' "s1 $user" seen_by user local node4
    always 'the health check answers' 200 "$dir/user" curl -s -o "$dir/health" -w '%{http_code}\n' http://172.30.0.1:32004/
}
part_firewall() {
    local name
    for name in node1 node2; do
        "$dir/$name" sh -c 'for file in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 1 > $file; done'
        "$dir/$name" nft -f - <<EOT
table inet hardened {
    set pods { type ipv4_addr; flags interval; elements = { 10.1.0.0/16, 10.2.0.0/16, 192.168.9.0/24 } }
    set pods6 { type ipv6_addr; flags interval; elements = { fd01::/64, fd02::/64, fd09::/64 } }
    chain common {
        ct state established,related accept
        ct state invalid drop
        iif lo accept
        meta l4proto { icmp, ipv6-icmp } accept
    }
    chain input {
        type filter hook input priority 0; policy drop;
        jump common
        tcp dport { 22, 10250, 10256, 30000-32767 } accept
    }
    chain forward {
        type filter hook forward priority 0; policy drop;
        jump common
        ip saddr @pods accept
        ip daddr @pods accept
        ip6 saddr @pods6 accept
        ip6 daddr @pods6 accept
    }
    chain output {
        type filter hook output priority 0; policy drop;
        jump common
        oif lo accept
        ip daddr @pods accept
        ip6 daddr @pods6 accept
    }
}
EOT
    done
    behind_a_firewall
    for name in node1 node2; do
        "$dir/$name" nft delete table inet hardened
        "$dir/$name" sh -c 'for file in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $file; done'
    done
}
part_firewalld() {
    local range
    cat >"$dir/bus.conf" <<EOT
<busconfig><type>system</type><listen>unix:path=$dir/bus</listen><policy context="default"><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy></busconfig>
EOT
    mkdir "$dir/firewalld"
    cp /etc/firewalld/firewalld.conf "$dir/firewalld"
    offline() { firewall-offline-cmd --system-config "$dir/firewalld" "$@" >/dev/null; }
    for range in 10.1.0.0/16 10.2.0.0/16 192.168.9.0/24 fd01::/64 fd02::/64 fd09::/64; do
        offline --zone=trusted --add-source=$range
    done
    offline --new-policy=to-pods
    offline --policy=to-pods --add-ingress-zone=ANY
    offline --policy=to-pods --add-egress-zone=trusted
    offline --policy=to-pods --set-target=ACCEPT
    offline --zone=public --add-port=30000-32767/tcp
    serve node1 bus dbus-daemon --nofork --config-file="$dir/bus.conf"
    await 'the bus' test -S "$dir/bus"
    DBUS_SYSTEM_BUS_ADDRESS=unix:path=$dir/bus serve node1 firewalld firewalld --nofork --nopid --system-config "$dir/firewalld" --log-file "$dir/firewalld.log"
    await 'firewalld' eval "'$dir/node1' nft list chain inet firewalld filter_FORWARD | grep -q reject"
    behind_a_firewall
    end_served firewalld
    end_served dbus-daemon
    await 'the end of firewalld' eval "! '$dir/node1' nft list table inet firewalld"
}
# The same clients without a proxy, with Ballast and with kube-proxy; one server, on the other node.
part_kube-proxy() {
    local name line sent failed one two
    local -A figures=()
    local lines=('http-new app cluster4 4000' 'http-kept app cluster4 2' 'http-new guest cluster4 4000' 'http-kept guest cluster4 2'
        'http-new user node4 4000' 'http-kept user node4 2' 'http-kept user node6 2' 'redis-kept app cluster4 100000'
        'redis-kept user node4 100000' 'dns guest cluster4' 'dns user node4')
    compare() {
        local client from way more
        for line in "${lines[@]}"; do
            read -r client from way more <<<"$line"
            # Not the endpoint of the Service: its sockets in TIME_WAIT would refuse the ports of the next clients.
            case $1$way in direct*6) way=s36 ;; direct*) way=s34 ;; esac
            read -r sent failed one two <<<"$($client $from one $way $more)"
            figures[$line]+=" ${one//_/ } | ${two//_/ } |"
            [ "$failed" = 0 ] || echo "$part: $1: $line: $failed of $sent failed" >>"$dir/bad"
        done
    }
    compare direct
    compare ballast
    for name in node1 node2; do
        end_agent $name TERM
        "$dir/$name" ballast cleanup --yes >/dev/null
    done
    start_kube_proxy
    compare kube-proxy
    echo
    echo '| client from way | p50 ms without a proxy | p99 | p50 with Ballast | p99 | p50 with kube-proxy | p99 |'
    echo '|---|--:|--:|--:|--:|--:|--:|'
    for line in "${lines[@]}"; do echo "| $line |${figures[$line]}"; done
}
start_kube_proxy() {
    local name file path api=https://172.30.0.254:6443
    openssl genrsa -out "$dir/account.key" 2048 2>/dev/null
    echo 'secret,admin,1,"system:masters"' >"$dir/tokens"
    serve lan etcd "$BALLAST_ETCD" --data-dir "$dir/etcd" --unsafe-no-fsync --log-level warn
    serve lan apiserver "$BALLAST_KUBE_APISERVER" --etcd-servers http://127.0.0.1:2379 --token-auth-file "$dir/tokens" \
        --service-cluster-ip-range 10.96.0.0/16,fd96::/112 --service-account-issuer https://kubernetes.default \
        --service-account-key-file "$dir/account.key" --service-account-signing-key-file "$dir/account.key" \
        --bind-address 172.30.0.254 --advertise-address 172.30.0.254 --cert-dir "$dir/certs" --authorization-mode AlwaysAllow
    call() { "$dir/lan" curl -s --fail-with-body -k -H 'Authorization: Bearer secret' "$@"; }
    await 'the API server' call $api/readyz
    await 'the namespace' call $api/api/v1/namespaces/default
    for file in "$dir"/manifests/*; do
        case $file in
        */node[12].yaml) path=api/v1/nodes ;;
        *-[46].yaml) path=apis/discovery.k8s.io/v1/namespaces/default/endpointslices ;;
        *) path=api/v1/namespaces/default/services ;;
        esac
        call -H 'Content-Type: application/yaml' --data-binary "@$file" $api/$path >"$dir/answer" || die "the API server refuses $file: $(cat "$dir/answer")"
    done
    cat >"$dir/kubeconfig" <<EOT
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "$api", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: secret}}]
EOT
    for name in node1 node2; do
        cat >"$dir/kube-proxy-$name.yaml" <<EOT
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: $name
nodePortAddresses: [0.0.0.0/0, "::/0"]
clientConnection: {kubeconfig: $dir/kubeconfig}
detectLocalMode: NodeCIDR
conntrack: {maxPerCore: 0, min: 0}
EOT
        serve $name kube-proxy "$BALLAST_KUBE_PROXY" --config "$dir/kube-proxy-$name.yaml"
    done
    at one cluster4 80
    await 'kube-proxy' "$dir/app" curl -sf -m 1 $url
    at one node6 80
    await 'kube-proxy, IPv6' "$dir/user" curl -sf -m 1 $url
}

# --- the run ---
begin_lab "$1"
chosen=${*:2}
build
services
start_servers
for name in node1 node2; do start_agent $name; done

for name in node1 node2; do await_agent $name; done
at web node6 80
await 'an answer' "$dir/user" curl -sf $url
: >"$dir/bad"
echo '| part | client | from | Service, way | requests | failed | SYNs again | p50 ms | p99 ms |'
echo '|---|---|---|---|--:|--:|--:|--:|--:|'
for part in ${chosen:-$all}; do
    declare -F "part_$part" >/dev/null || die "no part $part; there are: $all"
    begin=$SECONDS
    "part_$part"
    echo "$part: $((SECONDS - begin)) s" >&2
done
for name in node1 node2; do
    [ "$part" = kube-proxy ] || "$dir/$name" ballast status >"$dir/status" || die "$name: $(cat "$dir/status")"
done
if [ -s "$dir/bad" ]; then
    cat "$dir/bad" >&2
    die 'not all requests succeeded'
fi
