#!/usr/bin/env bash
# devices.sh BALLAST NETNS [DEVICE...]
# Tests Services over each kind of network device that the kernel has, and prints rows of the table in docs/datapath.md.
# `cargo xtask test devices` calls it, on this machine or on another kernel in qemu; NETNS is the program of the namespace tests.
#
#   client, here - node1 ---- node2 - there       10.1.0.9, 10.1.0.10   172.30.0.1   172.30.0.2   10.2.0.11
#                        \--- outside                                   172.30.0.9
#
# The tested device is the uplink of all three machines, a tunnel between them, or the device of the pods. The agent runs on
# node1, and follows the changes of the devices. Everything is named after the PID.
# shellcheck disable=SC2016,SC2086  # words of other shells, and lists of words
# shellcheck source=xtask/tools/lab.sh
. "$(dirname "$0")/lab.sh" devices

readonly netns=$2 ns=ballast-$$
readonly macs=02:00:00:00:00:0
# Bytes of a TCP message and of its answer: many packets. A datagram is a single one.
readonly large=60000 small=1000
wanted=("${@:3}")
declare -A in out numbers=([node1]=1 [node2]=2 [outside]=9)

within() { "$dir/$1" "${@:2}"; }
number() { echo "${numbers[$1]}"; }

# Starts a process in the namespace $2 that makes and answers connections, in the cgroup $3 of node1 if one is given.
peer() {
    local to from
    mkfifo "$dir/$1.in" "$dir/$1.out"
    # `exec` and `disown`: bash would report the end of the process.
    (exec "$dir/$2" sh -c "${3:+echo \$\$ >'$(group node1)/$3/cgroup.procs' &&} exec '$netns' __peer") <"$dir/$1.in" >"$dir/$1.out" &
    disown
    exec {to}>"$dir/$1.in" {from}<"$dir/$1.out"
    in[$1]=$to out[$1]=$from
}
ask() {
    echo "$2" >&"${in[$1]}"
    read -r -t 600 answer <&"${out[$1]}" || die "no word from $1"
}

# --- what a device is tested with ---
# The functions up_*, tunnel_* and pod_* create a device; `kinds` lists them. They fail if the kernel or a program for them is missing.
# Gives the machine $1 a device `eth$3` to the LAN's device $2.
cable() { on lan <<<"link add $2 type veth peer name eth$3 netns $ns-$1 address $macs$(number "$1")"; }
lan() { on lan <<<"link set $1 up master br0"; }
# Uplinks: up_KIND MACHINE NUMBER sets `uplink`, the device that gets the machine's addresses.
up_veth() {
    cable "$1" "p$2" 0
    lan "p$2"
    on "$1" <<<'link set eth0 up'
    uplink=eth0
}
# Two ports, and a bond at their other end: up_pair MACHINE NUMBER MODE
up_pair() {
    cable "$1" "p$2" 0
    cable "$1" "q$2" 1
    on lan <<EOF
link add b$2 type bond $3
link set p$2 master b$2
link set q$2 master b$2
link set p$2 up
link set q$2 up
EOF
    lan "b$2"
}
up_bond() {
    up_pair "$1" "$2" 'mode 802.3ad lacp_rate fast miimon 100 xmit_hash_policy layer3+4'
    on "$1" <<EOF
link add up0 type bond mode 802.3ad lacp_rate fast miimon 100 xmit_hash_policy layer3+4
link set eth0 master up0
link set eth1 master up0
link set up0 up
EOF
    uplink=up0
}
up_team() {
    up_pair "$1" "$2" 'mode balance-rr miimon 100'
    on "$1" <<<'link add up0 type team'
    within "$1" teamnl up0 setoption mode roundrobin
    on "$1" <<EOF
link set eth0 master up0
link set eth1 master up0
link set eth0 up
link set eth1 up
link set up0 up
EOF
    uplink=up0
}
up_vlan() {
    up_veth "$1" "$2"
    tag "$1" eth0
}
# A VLAN on the device $2.
tag() {
    on "$1" <<EOF
link add link $2 name $2.7 type vlan id 7
link set $2.7 up
EOF
    uplink=$2.7
}
up_bond_vlan() {
    up_bond "$1" "$2"
    tag "$1" up0
}
up_bridge() {
    up_veth "$1" "$2"
    on "$1" <<EOF
link add up0 type bridge vlan_filtering 1 vlan_default_pvid 0
link set up0 address $macs$2
link set eth0 master up0
link set up0 up
EOF
    uplink=up0
}
up_bridge_tagged() {
    up_bridge "$1" "$2"
    bridge -n "$ns-$1" vlan add vid 7 dev eth0
    bridge -n "$ns-$1" vlan add vid 7 dev up0 self
    tag "$1" up0
}
up_bridge_pvid() {
    up_bridge "$1" "$2"
    bridge -n "$ns-$1" vlan add vid 7 dev eth0 pvid untagged
    bridge -n "$ns-$1" vlan add vid 7 dev up0 self pvid untagged
}
# Only node1 has a VRF.
up_vrf() {
    up_veth "$1" "$2"
    [ "$1" = node1 ] || return 0
    on "$1" <<EOF
link add vrf0 type vrf table 10
link set vrf0 up
link set eth0 master vrf0
EOF
    # Processes outside of the VRF reach it by a route, and get its answers.
    within "$1" sh -c 'for kind in tcp udp; do echo 1 >/proc/sys/net/ipv4/${kind}_l3mdev_accept; done'
    vrf=1
}
# The routes of a machine with a VRF are in its table.
table() { [ "$1$vrf" != node11 ] || echo vrf vrf0; }
up_macvlan() { child "$1" "$2" 'macvlan mode bridge'; }
up_ipvlan() { child "$1" "$2" 'ipvlan mode l2'; }
# A device on top of the uplink; the uplink itself has no address.
child() {
    up_veth "$1" "$2"
    on "$1" <<EOF
link add link eth0 name up0 type $3
link set up0 up
EOF
    uplink=up0
}
up_macsec() {
    local key=0123456789abcdef0123456789abcdef other
    up_veth "$1" "$2"
    on "$1" <<<'link add link eth0 name up0 type macsec encrypt on'
    within "$1" ip macsec add up0 tx sa 0 pn 1 on key 00 $key
    for other in "${numbers[@]}"; do
        [ "$other" != "$2" ] || continue
        within "$1" ip macsec add up0 rx port 1 address $macs$other
        within "$1" ip macsec add up0 rx port 1 address $macs$other sa 0 pn 1 on key 00 $key
    done
    on "$1" <<<'link set up0 up'
    uplink=up0
}
# A NIC of the virtual machine with this driver.
nic() {
    local path name
    for path in /sys/class/net/*; do
        [ "$(basename "$(readlink "$path/device/driver")")" = "$3" ] || continue
        name=${path##*/}
        # Its name is the same again when it comes back.
        ip link set "$name" netns "$ns-$1"
        uplink=$name
        ethtool -l "$name" >/dev/null 2>&1 || true
        within "$1" ethtool -L "$name" combined "$(nproc)" 2>/dev/null || true
        on "$1" <<<"link set $name up"
        return
    done
    return 1
}
up_virtio() { nic "$1" "$2" virtio_net; }
up_vmxnet3() { nic "$1" "$2" vmxnet3; }
up_e1000e() { nic "$1" "$2" e1000e; }
up_igb() { nic "$1" "$2" igb; }

# Tunnels: tunnel_KIND MACHINE NUMBER. With a device for all others, it is `tun0`; with one for each, these are `tun1`, `tun2`, `tun9`.
each() {
    local other
    for other in "${numbers[@]}"; do [ "$other" = "$2" ] || on "$1" <<<"link add tun$other type $(eval echo "\"$3\"")"; done
}
tunnel_vxlan() {
    local other
    on "$1" <<<"link add tun0 type vxlan id 42 dstport 4789 local 172.30.0.$2"
    for other in "${numbers[@]}"; do
        [ "$other" = "$2" ] || bridge -n "$ns-$1" fdb append 00:00:00:00:00:00 dev tun0 dst "172.30.0.$other"
    done
}
tunnel_vxlan6() {
    local other
    on "$1" <<<"link add tun0 type vxlan id 42 dstport 4789 local fd30::$2"
    for other in "${numbers[@]}"; do
        [ "$other" = "$2" ] || bridge -n "$ns-$1" fdb append 00:00:00:00:00:00 dev tun0 dst "fd30::$other"
    done
}
tunnel_wireguard() {
    local other
    on "$1" <<<'link add tun0 type wireguard'
    [ -e "$dir/key$2" ] || for other in "${numbers[@]}"; do wg genkey >"$dir/key$other"; done
    within "$1" wg set tun0 private-key "$dir/key$2" listen-port 51820
    for other in "${numbers[@]}"; do
        [ "$other" = "$2" ] || within "$1" wg set tun0 peer "$(wg pubkey <"$dir/key$other")" endpoint "172.30.0.$other:51820" \
            allowed-ips "10.9.0.$other/32,10.$other.0.0/24,fd09::$other/128,fd0$other::/64$([ "$other" != 1 ] || echo ,192.0.2.0/24,fd92::/64)"
    done
}
tunnel_geneve() { each "$1" "$2" 'geneve id 42 remote 172.30.0.$other'; }
tunnel_gre() { each "$1" "$2" "gre local 172.30.0.$2 remote 172.30.0.\$other"; }
tunnel_gretap() { each "$1" "$2" "gretap local 172.30.0.$2 remote 172.30.0.\$other"; }
tunnel_ip6gre() { each "$1" "$2" "ip6gre local fd30::$2 remote fd30::\$other"; }
tunnel_ipip() { each "$1" "$2" "ipip local 172.30.0.$2 remote 172.30.0.\$other"; }
tunnel_sit() { each "$1" "$2" "sit mode any local 172.30.0.$2 remote 172.30.0.\$other"; }
tunnel_ip6tnl() { each "$1" "$2" "ip6tnl mode any local fd30::$2 remote fd30::\$other"; }

# Pods: pod_KIND NODE POD LAST-PART creates the pod's `eth0`, and its device on the node, which gets the routes.
pod_veth() {
    on "$1" <<<"link add $2 type veth peer name eth0 netns $ns-$2"
    routed "$@"
}
routed() {
    local n
    n=$(number "$1")
    on "$1" <<EOF
link set $2 $([ -z "$(table "$1")" ] || echo master vrf0) up
address add 169.254.1.1/32 dev $2
address add fe80::1/64 dev $2 nodad
route add 10.$n.0.$3/32 dev $2 $(table "$1")
route add fd0$n::$3/128 dev $2 $(table "$1")
EOF
    on "$2" <<EOF
link set eth0 up
address add 10.$n.0.$3/32 dev eth0
address add fd0$n::$3/128 dev eth0 nodad
route add 169.254.1.1 dev eth0 scope link
route add default via 169.254.1.1 dev eth0
route add default via fe80::1 dev eth0
EOF
}
pod_bridge() { port "$1" "$2" "$3" ''; }
pod_bridge_pvid() {
    port "$1" "$2" "$3" 'vlan_filtering 1 vlan_default_pvid 0'
    bridge -n "$ns-$1" vlan add vid 7 dev "$2" pvid untagged
    bridge -n "$ns-$1" vlan add vid 7 dev cni0 self pvid untagged
}
port() {
    local n
    n=$(number "$1")
    on "$1" <<<"link add $2 type veth peer name eth0 netns $ns-$2"
    ip -n "$ns-$1" link show cni0 >/dev/null 2>&1 || on "$1" <<EOF
link add cni0 type bridge $4
link set cni0 up
address add 10.$n.0.1/24 dev cni0
address add fd0$n::1/64 dev cni0 nodad
EOF
    on "$1" <<<"link set $2 master cni0 up"
    on "$2" <<EOF
link set eth0 up
address add 10.$n.0.$3/24 dev eth0
address add fd0$n::$3/64 dev eth0 nodad
route add default via 10.$n.0.1
route add default via fd0$n::1
EOF
}
# As `routed`, for a device without a link layer, and so without neighbours.
unaddressed() {
    local n
    n=$(number "$1")
    on "$1" <<EOF
link set $2 up
address add 169.254.1.1/32 dev $2
route add 10.$n.0.$3/32 dev $2
route add fd0$n::$3/128 dev $2
EOF
    on "$2" <<EOF
link set eth0 up
address add 10.$n.0.$3/32 dev eth0
address add fd0$n::$3/128 dev eth0 nodad
route add default dev eth0
route add ::/0 dev eth0
EOF
}
pod_netkit() {
    on "$1" <<<"link add $2 type netkit mode ${4:-l3} peer name eth0 netns $ns-$2"
    if [ -n "${4:-}" ]; then routed "$@"; else unaddressed "$@"; fi
}
pod_netkit2() { pod_netkit "$@" l2; }
# Another program that ends tc's list at the same device.
pod_netkit_foreign() {
    pod_netkit "$@"
    foreign "$1" "$2"
}
pod_netkit2_foreign() {
    pod_netkit "$@" l2
    foreign "$1" "$2"
}
foreign() {
    within "$1" tc qdisc add dev "$2" clsact
    within "$1" tc filter add dev "$2" ingress matchall action ok
    within "$1" tc filter add dev "$2" egress matchall action ok
}
# The CNI plugin `bandwidth`: a token bucket at the pod's device, and one at an ifb device for the other direction.
pod_bandwidth() {
    pod_veth "$@"
    on "$1" <<EOF
link add bw-$2 type ifb
link set bw-$2 up
EOF
    within "$1" tc qdisc add dev "$2" root tbf rate 1gbit burst 1mb latency 25ms
    within "$1" tc qdisc add dev "$2" ingress
    within "$1" tc filter add dev "$2" parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev "bw-$2"
    within "$1" tc qdisc add dev "bw-$2" root tbf rate 1gbit burst 1mb latency 25ms
}
# The pod is behind a process that copies packets between two tun or tap devices, as the process of a virtual machine does.
pod_tap() {
    local type=${4:-tap} end space device own other
    for end in "$1 $2 a b" "$2 eth0 b a"; do
        read -r space device own other <<<"$end"
        within "$space" socat "TUN,tun-type=$type,iff-no-pi,tun-name=$device" \
            "UNIX-SENDTO:$dir/$2$other,bind=$dir/$2$own" >>"$dir/log.socat" 2>&1 &
        pumps+=" $!"
    done
    # The devices are there before the sockets.
    for _ in {1..300}; do
        [ -S "$dir/$2a" ] && [ -S "$dir/$2b" ] && break
        sleep 0.1
    done
    if [ "$type" = tap ]; then routed "$@"; else unaddressed "$@"; fi
}
pod_tun() { pod_tap "$@" tun; }
# Devices on top of the uplink: the pods are machines of the LAN, and the machine outside is their router.
pod_macvlan() { guest "$@" 'macvlan mode bridge'; }
pod_ipvlan() { guest "$@" 'ipvlan mode l2'; }
guest() {
    local n
    n=$(number "$1")
    on "$1" <<<"link add link eth0 name $2 netns $ns-$2 type $4"
    on "$2" <<EOF
link set $2 name eth0
link set eth0 up
address add 10.$n.0.$3/32 dev eth0
address add fd0$n::$3/128 dev eth0 nodad
route add 10.0.0.0/8 dev eth0
route add 172.30.0.0/24 dev eth0
route add default via 172.30.0.9
route add fd01::/16 dev eth0
route add fd02::/16 dev eth0
route add fd30::/16 dev eth0
route add default via fd30::9
EOF
}
# The mode L3: the node's own address is the way to its pods.
pod_ipvlan_l3() {
    local n
    n=$(number "$1")
    on "$1" <<<"link add link eth0 name $2 netns $ns-$2 type ipvlan mode l3"
    on "$2" <<EOF
link set $2 name eth0
link set eth0 up
address add 10.$n.0.$3/32 dev eth0
address add fd0$n::$3/128 dev eth0 nodad
route add default dev eth0
route add ::/0 dev eth0
EOF
}

# --- the network ---
# Removes all devices. NICs return to the namespace of the machine.
clear() {
    local name device
    [ -z "$pumps" ] || { kill $pumps; wait $pumps || true; } 2>/dev/null
    pumps='' uplink='' vrf=''
    rm -f "$dir"/*[ab] "$dir"/key*
    for name in client here there node1 node2 outside lan; do
        # Devices on top of others are deleted with these.
        for device in $(ip -n "$ns-$name" -o link | awk -F'[ :@]+' '{ print $2 }'); do
            [ "$device" != lo ] || continue
            ip -n "$ns-$name" link delete "$device" 2>/dev/null ||
                ip -n "$ns-$name" link set "$device" netns 1 2>/dev/null || true
        done
    done
    on lan <<EOF
link add br0 type bridge
link set br0 up
EOF
}
# Creates the network with an uplink, a tunnel or none, and a device for pods.
network() {
    local name n other via device lan_pods=
    case $3 in macvlan | ipvlan) lan_pods=1 ;; esac
    for name in node1 node2 outside; do
        n=$(number $name)
        [ -n "$broken" ] || "up_$1" $name "$n"
        on $name <<EOF
address add 172.30.0.$n/24 dev $uplink
address add fd30::$n/64 dev $uplink nodad
EOF
        [ $name = outside ] || on $name <<EOF
route add default via 172.30.0.9 $(table $name)
route add default via fd30::9 $(table $name)
EOF
    done
    if [ "$2" != none ]; then
        for name in node1 node2 outside; do "tunnel_$2" $name "$(number $name)"; done
        for name in node1 node2 outside; do
            n=$(number $name)
            [ -z "$broken" ] || return 0
            for device in $(ip -n "$ns-$name" -o link | awk -F'[ :@]+' '$2 ~ /^tun[0-9]/ { print $2 }'); do
                on $name <<<"link set $device up"
                # Without a subnet if there is a device for each other machine.
                other=${device#tun}
                case $other in 0) other=24,64 ;; *) other=32,128 ;; esac
                on $name <<EOF
address add 10.9.0.$n/${other%,*} dev $device
address add fd09::$n/${other#*,} dev $device nodad
EOF
            done
        done
    fi
    [ -z "$vrf" ] || on node1 <<EOF
route add default dev vrf0
route add ::/0 dev vrf0
EOF
    # Routes to the pods of the other nodes, and from outside to the addresses of Services.
    [ -z "$broken" ] || return 0
    for via in node1:2 node1:9 node2:1 node2:9 outside:1 outside:2; do
        name=${via%:*} other=${via#*:}
        device=$(ip -n "$ns-$name" -o link | awk -F'[ :@]+' -v one="tun$other" '$2 == "tun0" || $2 == one { print $2 }')
        if [ -n "$lan_pods" ]; then
            [ "$other" = 9 ] || on "$name" <<EOF
route add 10.$other.0.0/24 dev $uplink
route add fd0$other::/64 dev $uplink
EOF
        elif [ -z "$device" ]; then
            [ "$other" = 9 ] || on "$name" <<EOF
route add 10.$other.0.0/24 via 172.30.0.$other $(table $name)
route add fd0$other::/64 via fd30::$other $(table $name)
EOF
        else
            [ "$device" = tun0 ] || on "$name" <<EOF
route add 10.9.0.$other dev $device
route add fd09::$other dev $device
EOF
            [ "$other" = 9 ] || on "$name" <<EOF
route add 10.$other.0.0/24 via 10.9.0.$other dev $device onlink
route add fd0$other::/64 via fd09::$other dev $device onlink
EOF
        fi
        [ "$via" = outside:1 ] || continue
        if [ -z "$device" ]; then
            on outside <<EOF
route add 192.0.2.0/24 via 172.30.0.1 $(table $name)
route add fd92::/64 via fd30::1 $(table $name)
EOF
        else
            on outside <<EOF
route add 192.0.2.0/24 via 10.9.0.1 dev $device onlink src 10.9.0.9
route add fd92::/64 via fd09::1 dev $device onlink src fd09::9
EOF
        fi
    done
    [ -z "$lan_pods" ] || for name in node1:1 node2:2; do
        on "${name%:*}" <<EOF
route add 10.${name#*:}.0.0/24 dev $uplink
route add fd0${name#*:}::/64 dev $uplink
EOF
    done
    for name in node1:client:9 node1:here:10 node2:there:11; do
        IFS=: read -r name other n <<<"$name"
        "pod_$3" "$name" "$other" "$n"
        # What a tunnel needs.
        [ "$2" = none ] || on "$other" <<<'link set eth0 mtu 1380'
    done
}

# --- the Services ---
slices() {
    local family
    for family in 4:IPv4 6:IPv6; do
        cat <<EOF
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: $1-${family%:*}, namespace: default, labels: {kubernetes.io/service-name: $1}}
addressType: ${family#*:}
endpoints: [{addresses: ["$([ ${family%:*} = 4 ] && echo "$3" || echo "$4")"], nodeName: $2, conditions: {ready: true}}]
ports: [{name: tcp, port: 8080, protocol: TCP}, {name: udp, port: 8080, protocol: UDP}]
EOF
    done
}
service() {
    cat <<EOF
---
apiVersion: v1
kind: Service
metadata: {name: $1, namespace: default}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.$2
  clusterIPs: [10.96.0.$2, "fd96::$2"]
  ipFamilies: [IPv4, IPv6]
  ports: [{name: tcp, port: 80, protocol: TCP, nodePort: 3000$2}, {name: udp, port: 80, protocol: UDP, nodePort: 3000$2}]
status: {loadBalancer: {ingress: [{ip: 192.0.2.$2}, {ip: "fd92::$2"}]}}
EOF
}
node_object() {
    cat <<EOF
---
apiVersion: v1
kind: Node
metadata: {name: node$1}
spec: {podCIDR: 10.$1.0.0/24, podCIDRs: [10.$1.0.0/24, "fd0$1::/64"]}
status: {addresses: [{type: InternalIP, address: 172.30.0.$1}, {type: InternalIP, address: "fd30::$1"}]}
EOF
}

# --- the agent ---
start_agent_with() {
    local flags
    flags="--ejection off --sync-period 2s --max-services 64 --max-frontends 64 --max-slots 1024 --max-backends 256 --max-flows 16384 --max-sockets 4096 $*"
    # `exec`: the process whose number is kept is the agent, not a shell.
    (exec "$dir/node1" ballast run --hostname-override node1 --manifests "$dir/manifests" --cgroup-root "$(group node1)" \
        --service-cidrs 10.96.0.0/16,fd96::/112 $flags </dev/null >>"$dir/log" 2>&1) &
    agent[node1]=$!
    local lines=${logged:-0}
    for _ in {1..1200}; do
        tail -n "+$((lines + 1))" "$dir/log" | grep -q 'first sync done' && { logged=$(wc -l <"$dir/log"); return; }
        kill -0 "${agent[node1]}" 2>/dev/null || break
        sleep 0.25
    done
    cat "$dir/log"
    die 'the agent does not start'
}

# --- the checks ---
# Whether the client $1 is served: $2 Tcp or Udp, $3 address, $4 name of the server, $5 pattern of the address that it may see.
is_served() {
    local size=$large kind=$2
    [ "$kind" = Tcp ] || size=$small
    ask "$1" "{\"Once\":{\"kind\":\"$kind\",\"to\":\"$3\",\"source_port\":0,\"size\":$size,\"close\":\"Client\",\"patience\":2}}"
    [[ $answer =~ \"server\":\"([^\"]*)\",\"client\":\"\[?([^\"]*[^]])\]?:[0-9]+\" ]] || {
        [[ $answer =~ \"call\":\"([^\"]*)\".*\"text\":\"([^\"]*)\" ]] && why="${BASH_REMATCH[1]}: ${BASH_REMATCH[2]}" || why=$answer
        return 1
    }
    [ "${BASH_REMATCH[1]}" = "$4" ] || { why="served by ${BASH_REMATCH[1]}"; return 1; }
    [[ " $5 " == *" ${BASH_REMATCH[2]} "* ]] || { why="the endpoint sees ${BASH_REMATCH[2]}"; return 1; }
}
# The cell of a client's column: yes, or no with what is not served.
cell() {
    local client=$1 name four kind to end attempts seen tried=0 failed='' reasons=''
    for name in here there; do
        for four in 4 6; do
            case $client in
                pod-*) seen=10.1.0.9; [ $four = 4 ] || seen=fd01::9 ;;
                *) seen=$own ;;
            esac
            for to in $(frontends "$client" "$name" $four); do
                for kind in Tcp Udp; do
                    tried=$((tried + 1)) end=$((SECONDS + patience)) attempts=0
                    until is_served "$client" $kind "$to" "$name" "$seen"; do
                        attempts=$((attempts + 1))
                        # An emulated machine may be slow.
                        if [ "$SECONDS" -ge "$end" ] && [ $attempts -gt 2 ]; then
                            failed+=" $name/IPv$four/$kind" reasons+=" [$name $to $kind: $why]"
                            patience=2
                            break
                        fi
                        sleep 0.2
                    done
                    # Only the first answer waits for the agent.
                    [ -n "$failed" ] || patience=8
                done
            done
        done
    done
    result=yes
    if [ -n "$failed" ]; then
        local lost part
        lost=$(wc -w <<<"$failed")
        result="no ($lost of $tried)"
        [ "$lost" != "$tried" ] || result=no
        for part in here:elsewhere there:here IPv4:IPv6 IPv6:IPv4; do
            [ $((lost * 2)) != "$tried" ] || [ "$(grep -o "${part%:*}/" <<<"$failed" | wc -l)" != "$lost" ] || result="only ${part#*:}"
        done
        echo "    $kind_name, $client:$reasons" >&2
        # Without a Service, and what the programs refused or dropped.
        for to in 10.1.0.10:here 10.2.0.11:there '[fd01::10]:here' '[fd02::11]:there'; do
            [ "$client" != outside ] || break
            is_served "$client" Tcp "${to%:*}:8080" "${to##*:}" "$seen $own" && why=served
            echo "    without a Service, ${to%:*}: $why" >&2
        done
        within node1 ballast status -o wide | grep -i 'drop\|refus' >&2 || true
    fi
}
frontends() {
    local n=1
    [ "$2" = here ] || n=2
    case $1-$3 in
        outside-4) echo "192.0.2.$n:80"; [ -n "$tunnelled" ] || echo "172.30.0.1:3000$n" ;;
        outside-6) echo "[fd92::$n]:80"; [ -n "$tunnelled" ] || echo "[fd30::1]:3000$n" ;;
        *-4) echo "10.96.0.$n:80" ;;
        *-6) echo "[fd96::$n]:80" ;;
    esac
}
# Whether the driver of node1's uplink has run the program, and sent packets from there.
xdp() {
    local sent device
    device=$(ip -n "$ns-node1" -o address | awk '$4 == "172.30.0.1/24" { print $2 }')
    sent=$(within node1 ethtool -S "$device" | awk 'tolower($0) ~ /xdp[_ ]tx/ && !/err|drop/ { sent += $NF } END { print sent + 0 }')
    case $(ip -n "$ns-node1" link show "$device") in
        *' xdp '* | *prog/xdp*) [ "$sent" = 0 ] && echo 'XDP has sent nothing' || echo 'XDP' ;;
        *) echo 'no XDP' ;;
    esac
}
# NAME REASON UPLINK TUNNEL POD: tests one kind of device and prints its row. REASON says why a part of it is not served.
row() {
    local name=$1 reason=$2 cells='' client patience=30 tunnelled=
    kind_name=$1
    shift
    clear
    [ "$3" = none ] || tunnelled=1
    # A failed command does not end the script here: the kernel may lack this kind.
    broken=''
    set +e -E
    trap 'broken=1' ERR
    network "$2" "$3" "$4" 2>"$dir/why"
    trap - ERR
    set -e +E
    if [ -n "$broken" ]; then
        echo "absent: $name: $(grep -v '^Command failed' "$dir/why" | head -n 1)"
        return
    fi
    own=$(ip -n "$ns-node1" -o address | awk '{ sub("/.*", "", $4); print $4 }' | tr '\n' ' ')
    for client in pod-socket pod-packet node-socket node-packet outside; do
        cell $client
        cells+="|$result"
        echo "    $name: $client: $result"
    done
    if [ "$name" != "${name%NIC)}" ]; then
        name+=", $(xdp)"
        # Why there is no XDP, if there is none.
        grep 'XDP' "$dir/log" | tail -n 1 >&2
    fi
    echo "row: $name$cells|$reason"
    case $cells in
        *no* | *only*) [ -n "$reason" ] || failures+=" [$name: not served]" ;;
        *) [ -z "$reason" ] || failures+=" [$name: served, but there is a reason why not]" ;;
    esac
    [ -z "${PAUSE:-}" ] || { echo "PAUSE: $dir $ns"; sleep "$PAUSE"; }
}

kinds='
veth (no tested device)|veth none veth
bond (802.3ad)|bond none veth
team (roundrobin)|team none veth
VLAN|vlan none veth
VLAN on bond|bond_vlan none veth
bridge with VLAN filtering, NIC untagged|bridge_pvid none veth
VLAN on bridge with VLAN filtering, NIC tagged|bridge_tagged none veth
VRF with uplink and pods|vrf none veth|a packet of a process outside of the VRF leaves by the device of the VRF, where no route to the pods of this node is found; its socket is translated
macvlan with address of node|macvlan none veth
ipvlan L2 with address of node|ipvlan none veth|an ipvlan device receives packets for its own addresses only, so the node cannot forward through it: pods do not reach other nodes without a Service either
MACsec|macsec none veth
WireGuard|veth wireguard veth
VXLAN|veth vxlan veth
VXLAN over IPv6|veth vxlan6 veth
GENEVE|veth geneve veth
GRE|veth gre veth
GRE TAP|veth gretap veth
GRE over IPv6|veth ip6gre veth
IP-in-IP|veth ipip veth|the tunnel carries IPv4 only
sit|veth sit veth
ip6tnl|veth ip6tnl veth
pods behind a bridge|veth none bridge
pods behind a bridge with VLAN filtering|veth none bridge_pvid
netkit L3|veth none netkit
netkit L2|veth none netkit2
netkit L3 with a foreign tc program|veth none netkit_foreign
netkit L2 with a foreign tc program|veth none netkit2_foreign
veth with the bandwidth plugin (ifb)|veth none bandwidth
tap|veth none tap
tun|veth none tun
macvlan for pods|veth none macvlan|the kernel passes no packets between a parent and its children; packets to Services leave for the LAN'\''s router
ipvlan L2 for pods|veth none ipvlan|as with macvlan
ipvlan L3 for pods|veth none ipvlan_l3|as with macvlan
'
nics='
virtio-net (NIC)|virtio none veth
vmxnet3 (NIC)|vmxnet3 none veth
igb (NIC)|igb none veth
e1000e (NIC)|e1000e none veth
'

clear_up ''
pumps='' failures='' own='' broken=''
begin_lab "$1"
mkdir "$dir/bpf-node1"
mount -t bpf bpf "$dir/bpf-node1"
mkdir -p "$(group node1)/kubepods/pod"
: >"$dir/log"
{
    service here 1
    service there 2
    slices here node1 10.1.0.10 fd01::10
    slices there node2 10.2.0.11 fd02::11
    node_object 1
    node_object 2
} >"$dir/manifests/all.yaml"
for name in client here there node1 node2 outside lan; do
    machine $name
    within $name sh -c 'for which in all default; do echo 1 >/proc/sys/net/ipv4/conf/$which/rp_filter; done'
done
peer here here kubepods/pod
peer there there ''
peer pod-socket client kubepods/pod
peer pod-packet client ''
peer node-socket node1 .
peer node-packet node1 ''
peer outside outside ''
for name in here there; do
    for address in 0.0.0.0:8080 '[::]:8080'; do
        for is_tcp in true false; do ask $name "{\"Serve\":{\"is_tcp\":$is_tcp,\"addr\":\"$address\",\"name\":\"$name\"}}"; done
    done
done
clear
network veth none veth
start_agent_with --xdp auto
run() {
    local name parts reason
    while IFS='|' read -r name parts reason; do
        [ -n "$name" ] || continue
        [ ${#wanted[@]} = 0 ] || [[ "${wanted[*]}" == *"$name"* || " ${wanted[*]} " == *" ${parts% *} "* ]] || continue
        row "$name" "$reason" $parts
    done
}
run <<<"$kinds"
# Only those of a virtual machine that was made for this test.
if [ -e /ballast/devices.sh ]; then
    end_agent node1 TERM
    start_agent_with --xdp native
    run <<<"$nics"
fi
[ -z "$failures" ] || die "$failures"
