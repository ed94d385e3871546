//! The list of all reasons why a packet or a call was refused, dropped, or passed unchanged.
//!
//! Programs count reasons, `/metrics` and the command line name them, and `docs/reasons.md` is generated from this file
//! (`cargo xtask build docs`).

/// What happens to the packet or the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The client gets an error immediately: ECONNREFUSED, ICMP port unreachable, or a TCP reset.
    Reject,
    /// The packet is dropped without an answer.
    Drop,
    /// The packet or call continues untranslated.
    Pass,
}

const fn bit_if(is: bool, number: u32) -> u64 {
    assert!(number < u64::BITS, "a bit for each reason");
    if is { 1 << number } else { 0 }
}

/// Returns the verdict of the reason with that number; any verdict if the number is not a reason's. The function tests bits
/// instead of a table: the verifier of kernels before 6.4 loses the bounds of an index that the compiler keeps on the
/// stack.
#[inline(always)]
pub const fn verdict_of(number: u32) -> Verdict {
    let bit = 1u64 << (number & 63);
    if REJECTS & bit != 0 {
        Verdict::Reject
    } else if DROPS & bit != 0 {
        Verdict::Drop
    } else {
        Verdict::Pass
    }
}

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+
    $name:ident = $number:literal, $label:literal, $verdict:ident, $advice:literal;)+) => {
        /// A reason; its number never changes.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        const REJECTS: u64 = $(bit_if(matches!(Verdict::$verdict, Verdict::Reject), $number))|+;
        const DROPS: u64 = $(bit_if(matches!(Verdict::$verdict, Verdict::Drop), $number))|+;

        impl Reason {
            /// All reasons, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Returns the label in metrics, tables and JSON.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }

            /// Returns what happens to the packet or the call.
            pub const fn verdict(self) -> Verdict {
                match self { $(Self::$name => Verdict::$verdict,)+ }
            }

            /// One sentence for people.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$name => concat!($($doc),+),)+ }
            }

            /// What to look at, or to do about it.
            pub const fn advice(self) -> &'static str {
                match self { $(Self::$name => $advice,)+ }
            }
        }
    };
}

reasons! {
    /// The Service has no usable endpoint on any node.
    NoEndpoint = 0, "no_endpoint", Reject,
        "Check the readiness of its pods.";
    /// The Service's policy is Local, and only other nodes have endpoints.
    NoLocalEndpoint = 1, "no_local_endpoint", Drop,
        "Configure the load balancer to use the Service's healthCheckNodePort, or schedule a pod on this node.";
    /// The flow table is full: all examined entries hold established flows.
    FlowTableFull = 2, "flow_table_full", Drop,
        "Raise --max-flows.";
    /// After translation, the flow has the same addresses and ports as another flow, and no other source port was free.
    FlowCollision = 3, "flow_collision", Drop,
        "Many clients share one address and source port: configure the NAT in front of them to use more source ports.";
    /// The packet is shorter than its headers say, or than the protocol requires.
    Malformed = 4, "malformed", Pass,
        "No action needed. If the count grows, find out who sends these packets.";
    /// A later fragment without ports whose first fragment was not for a Service, or a fragment of an SCTP packet.
    Fragment = 5, "fragment", Pass,
        "No action needed. If the count grows, look for a link with a smaller MTU than the others.";
    /// A slot or backend that the service entry refers to is missing, or a tail call of a packet program failed.
    MapInconsistent = 6, "map_inconsistent", Drop,
        "No action needed if the count stays small: the agent repairs the maps at its next comparison. If it grows, look for another tool that writes to the maps.";
    /// The ICMP answer to a refused packet could not be built; the packet was dropped without an answer.
    RejectFailed = 7, "reject_failed", Drop,
        "Check the free memory of the node.";
    /// A helper of the kernel failed to rewrite the packet.
    RewriteFailed = 8, "rewrite_failed", Drop,
        "Check the free memory of the node.";
    /// The frontend address of a socket could not be stored; the socket works, but may see the address of its backend.
    SocketTableFull = 9, "socket_table_full", Pass,
        "Raise --max-sockets.";
    /// The client's address is in no range of the Service's loadBalancerSourceRanges.
    SourceNotAllowed = 10, "source_not_allowed", Drop,
        "Compare the client's address, as seen by this node, with the ranges.";
    /// The address is in a range of ClusterIPs, but no Service has it.
    UnallocatedAddress = 11, "unallocated_address", Drop,
        "Find out which client still uses the address of a deleted Service. If other machines have addresses in the range, use --unallocated-addresses pass.";
    /// The address belongs to a Service, but the Service does not have this port. connect of a UDP socket succeeds; its datagrams are rejected.
    UndefinedPort = 12, "undefined_port", Reject,
        "Compare port and protocol with the ports of the Service.";
    /// Every source port for packets to this backend is in use (SNAT).
    SnatPortsExhausted = 13, "snat_ports_exhausted", Drop,
        "Extend --snat-ports, or schedule a pod of the Service on this node.";
    /// The node has no address to forward the packet to its backend or client, its route is of type blackhole, or an encapsulated packet has no route.
    NoRoute = 14, "no_route", Drop,
        "Check the node's InternalIP, and its route to the endpoint.";
    /// The packet's time to live (hop limit) has expired; the client gets an ICMP error, unless the packet is one.
    TtlExceeded = 15, "ttl_exceeded", Reject,
        "Look for a routing loop, unless a client uses traceroute.";
    /// The packet exceeds the MTU of the next link; the client gets an ICMP error with the MTU.
    PacketTooBig = 16, "packet_too_big", Reject,
        "No action needed if the client reduces its packet size. Otherwise look for a firewall that drops ICMP.";
    /// A process on the node tried to bind a port that is the NodePort of a Service.
    NodePortTaken = 17, "node_port_taken", Reject,
        "Use another port for the process, or another nodePort for the Service.";
    /// The backend of a client could not be stored (session affinity).
    AffinityTableFull = 18, "affinity_table_full", Pass,
        "The client's next connection may use another endpoint. See `ballast map list` for its fill, and check the free memory of the node.";
    /// A later fragment to a Service address; the first fragment of its packet was not seen.
    FragmentWithoutFirst = 19, "fragment_without_first", Drop,
        "Look for a path that loses or reorders packets. All fragments of a packet must arrive at the same node, in order.";
    /// The packet was dropped without an ICMP answer, because this CPU reached its rate limit for ICMP answers.
    RejectLimited = 20, "reject_limited", Drop,
        "Find out which client keeps sending to a Service without endpoints, or keeps pinging Services.";
    /// The address is in a range of ClusterIPs, but Ballast does not manage it: another proxy serves the Service, or a device of the node has the address.
    UnmanagedAddress = 21, "unmanaged_address", Pass,
        "No action needed if this is intended (label service.kubernetes.io/service-proxy-name, or the device of NodeLocal DNSCache).";
    /// The packet's source address cannot be a client: loopback, multicast, broadcast, unspecified, an address of this node, or an address whose route uses another device.
    MartianSource = 22, "martian_source", Drop,
        "Find out who spoofs addresses behind the device.";
    /// A TCP reset or FIN is outside the window of the connection: it is forwarded, but does not change the state of the flow.
    OutOfWindow = 23, "out_of_window", Pass,
        "No action needed. If the count grows, find out who forges resets.";
    /// A TCP segment of no known connection that cannot start one: a reset, a FIN, or a SYN-ACK.
    InvalidState = 24, "invalid_state", Drop,
        "No action needed. If the count grows, look for clients that keep idle connections longer than the timeouts, or for port scans.";

    /// The sender of an encapsulated packet to a Service is not a node of the cluster: the packet is left to the node, which decapsulates it if it has a tunnel device for it.
    ForeignTunnel = 25, "foreign_tunnel", Pass,
        "No action needed if a load balancer in front of the cluster sends IP-in-IP packets. If the source is a node, check its InternalIP: the node must send from this address. Otherwise find out who sends these packets.";
    /// Another node sent an encapsulated packet to an endpoint that this node does not have, or does not have any more.
    TunnelNoEndpoint = 26, "tunnel_no_endpoint", Drop,
        "No action needed if the count stays small: the client retransmits. If it grows, compare the Services of both nodes (`kubectl ballast service list`).";
    /// An endpoint refused a connection, and another endpoint of the Service has answered lately: the refusal is dropped, and the client's retransmitted SYN goes to the other endpoint. At most once per connection.
    RefusalDropped = 27, "refusal_dropped", Drop,
        "Find out why the endpoint refuses connections. Add a readiness probe to the pods, so that they are ready only when they listen.";
    /// An endpoint refused connections of two clients in a row: new connections skip it for some time. Counted once per ejection.
    EndpointEjected = 28, "endpoint_ejected", Pass,
        "Check the endpoint (see `ballast backend list`), its readiness probe, and the network to its node.";
    /// The endpoint of the connection was removed, and the Service has the removal policy `reset`: the segment is answered with a TCP reset.
    EndpointLeft = 29, "endpoint_left", Reject,
        "No action needed: clients connect again. The annotation ballast.io/removal-policy of the Service controls this.";
    /// A segment of a DSR connection without a flow on this node was sent to the endpoint of a previous table. The connection moved from another node, or its flow was evicted. Counted once per connection.
    SecondChance = 30, "second_chance", Pass,
        "No action needed: the connection stays with its endpoint. If the count grows although no address moves between nodes, check whether flows are evicted (--max-flows).";
    /// A pod or guest of this node sent an encapsulated packet (protocol 4 or 41) to a node, while nodes send each other such packets (DSR).
    LocalTunnel = 31, "local_tunnel", Drop,
        "Find out which pod forges IP-in-IP packets. If the device leads to other nodes, name it in --uplinks.";
    /// The Service has no endpoint on this node for clients outside, and its annotation ballast.io/external-failover lets their packets pass: the node routes them, without translation.
    PassedOn = 32, "passed_on", Pass,
        "No action needed if another node or site answers at this address. If clients get \"time exceeded\", the route of the address leads back to this node.";
    /// An ICMP echo request to an address of a Service was answered (--vip-echo).
    EchoAnswered = 33, "echo_answered", Pass,
        "No action needed. If the count grows, find out who pings Services.";
    /// A process of the node sent a packet to a Service whose endpoint is a process of the node, too: only calls of sockets are translated on this path. The process gets an error, and its next connection is translated.
    OwnEndpoint = 34, "own_endpoint", Reject,
        "No action needed if the endpoint has just started. Otherwise check that the sockets of the node are translated (--socket-lb).";
    /// The ports of a packet to this node or to a Service cannot be read: it is a first fragment with a part of the transport header only (RFC 3128), or has more than six IPv6 extension headers, or two VLAN tags of VLAN 0. A process of the node could receive it, past the Service's source ranges.
    HiddenPorts = 35, "hidden_ports", Drop,
        "Find out who sends these packets: no ordinary host does.";
    /// The connection was idle when endpoints joined the Service, which has the annotation ballast.io/rebalance: the next request is answered with a TCP reset, so that the client connects again. The endpoint has not got the request.
    Rebalanced = 36, "rebalanced", Reject,
        "No action needed: clients connect again, and send the request again.";
    /// More connections to other nodes (DSR) began on a CPU than --dsr-flow-rate allows: the packet was sent to the endpoint that the Maglev table selects, without an entry in the flow table. So is a TCP reset or FIN without an entry.
    FlowBypassed = 37, "flow_bypassed", Pass,
        "No action needed: the connection works. If the count grows, find out whether a flood of new connections is an attack; if it is not, raise --dsr-flow-rate.";
    /// The node has no route to the packet's backend or client, or its route is of type unreachable or prohibit; the sender gets an ICMP error.
    Unreachable = 38, "unreachable", Reject,
        "Check the node's route to the endpoint (`ip route get`), and whether the endpoint's node is up.";
}

impl Reason {
    /// Number of reasons: the size of the `reasons` map.
    pub const COUNT: u32 = Self::ALL.len() as u32;

    /// Whether Ballast or its settings are the cause, and not the traffic or the configuration of a Service.
    pub const fn is_fault(self) -> bool {
        matches!(self, Self::FlowTableFull | Self::MapInconsistent | Self::RewriteFailed | Self::RejectFailed)
    }

    /// Returns the reason of that number, or `None` if there is none.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

impl Verdict {
    /// Returns the label in metrics, tables and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Reject => "reject",
            Self::Drop => "drop",
            Self::Pass => "pass",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_positions() {
        for (position, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, position, "{}", reason.label());
            assert_eq!(Reason::from_number(position as u32), Some(*reason));
            assert!(reason.explanation().ends_with('.') && reason.advice().ends_with('.'), "{reason:?}");
        }
        assert_eq!(Reason::from_number(Reason::COUNT), None);
    }

    #[test]
    fn programs_and_agent_know_the_same_verdicts() {
        for reason in Reason::ALL {
            assert_eq!(verdict_of(*reason as u32), reason.verdict(), "{}", reason.label());
        }
    }
}
