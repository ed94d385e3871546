//! The one list of reasons: why a packet or a connect was refused, dropped, or passed by untouched.
//!
//! Programs count them, `/metrics` and the command line name them, and `docs/reasons.md` is made from this file
//! (`cargo xtask docs`).

/// What happens to the packet or the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The client is told at once: ECONNREFUSED, ICMP port unreachable, or a TCP reset.
    Reject,
    /// Silence.
    Drop,
    /// It goes on untranslated.
    Pass,
}

const fn bit_if(is: bool, number: u32) -> u64 {
    assert!(number < u64::BITS, "a bit for each reason");
    if is { 1 << number } else { 0 }
}

/// The verdict of the reason with that number; of a number that is none, anything. By bits and not by a table:
/// kernels before 6.4 forget the bounds of an index that the compiler keeps on the stack.
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
        /// A reason, by a number that stays the same.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Reason {
            $($(#[doc = $doc])+ $name = $number,)+
        }

        const REJECTS: u64 = $(bit_if(matches!(Verdict::$verdict, Verdict::Reject), $number))|+;
        const DROPS: u64 = $(bit_if(matches!(Verdict::$verdict, Verdict::Drop), $number))|+;

        impl Reason {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The word in metrics, tables and JSON.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }

            /// What happens to the packet or the call.
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
    /// The Service has no usable endpoint anywhere.
    NoEndpoint = 0, "no_endpoint", Reject,
        "Look at its pods' readiness.";
    /// The Service's policy is Local, and only other nodes have endpoints.
    NoLocalEndpoint = 1, "no_local_endpoint", Drop,
        "Let load balancers ask the Service's healthCheckNodePort, or give this node a pod.";
    /// Every flow entry that was looked at holds an established flow.
    FlowTableFull = 2, "flow_table_full", Drop,
        "Raise --max-flows.";
    /// No source port was found that tells this flow from another one of the same client and backend.
    FlowCollision = 3, "flow_collision", Drop,
        "Many clients behind one address use one source port: let whatever translates them use more ports.";
    /// The packet's headers are shorter than they say, or than the protocol needs.
    Malformed = 4, "malformed", Pass,
        "Nothing, unless it grows: then look at what sends it.";
    /// A later fragment carries no ports, and the first one of its packet was none of ours.
    Fragment = 5, "fragment", Pass,
        "Nothing, unless it grows: then look for a link with a smaller MTU than the rest.";
    /// A slot or backend that the service entry refers to is missing, or a tail call of a packet program fails.
    MapInconsistent = 6, "map_inconsistent", Drop,
        "Nothing, if it stays small. If it grows, look for another tool that writes to the maps; the next comparison repairs them.";
    /// The ICMP answer to a refused packet could not be built; the packet was dropped without one.
    RejectFailed = 7, "reject_failed", Drop,
        "The verdict is right, the answer is missing; memory may be short.";
    /// A helper of the kernel failed to rewrite the packet.
    RewriteFailed = 8, "rewrite_failed", Drop,
        "Memory may be short.";
    /// The frontend that a socket dialled could not be stored; the socket works, but may see its backend's address.
    SocketTableFull = 9, "socket_table_full", Pass,
        "Raise --max-sockets.";
    /// The client's address is in none of the Service's loadBalancerSourceRanges.
    SourceNotAllowed = 10, "source_not_allowed", Drop,
        "Compare the client's address, as this node sees it, with the list.";
    /// The address is in the range of Service addresses, and no Service has it.
    UnallocatedAddress = 11, "unallocated_address", Drop,
        "Look for who still uses the address of a Service that is gone.";
    /// The address is a Service's, and the Service has no such port.
    UndefinedPort = 12, "undefined_port", Reject,
        "Compare the port and the protocol with the Service's.";
    /// Every source port for packets to this backend is in use (SNAT).
    SnatPortsExhausted = 13, "snat_ports_exhausted", Drop,
        "Widen --snat-ports, or give this node a pod of the Service.";
    /// The node has no address, or no route, to send the packet on to its backend or client.
    NoRoute = 14, "no_route", Drop,
        "Look at the node's InternalIP, and at its route to the endpoint.";
    /// The packet's time to live, or hop limit, has ended.
    TtlExceeded = 15, "ttl_exceeded", Drop,
        "Look for a routing loop, unless a client runs traceroute.";
    /// The packet is larger than the next link takes; its client is told how large it may be.
    PacketTooBig = 16, "packet_too_big", Reject,
        "Nothing, if the client learns from it; otherwise something on its way drops ICMP.";
    /// A process of the node wanted to listen on a port that is a Service's NodePort.
    NodePortTaken = 17, "node_port_taken", Reject,
        "Give the process another port, or the Service another nodePort.";
    /// The backend that a client is to keep (session affinity) could not be stored.
    AffinityTableFull = 18, "affinity_table_full", Pass,
        "It may reach another endpoint with its next connection. Memory may be short.";
    /// A later fragment to a Service address, and the first one of its packet has not passed.
    FragmentWithoutFirst = 19, "fragment_without_first", Drop,
        "Look for a path that loses or reorders packets; fragments of one packet must come by one node, in order.";
    /// A packet was to be answered by ICMP, and this CPU has sent as many answers as it may for now.
    RejectLimited = 20, "reject_limited", Drop,
        "Look for who keeps sending to a Service that has no endpoint.";
    /// The address is in the range of Service addresses, and Ballast leaves it alone: another proxy serves the Service, or the node owns the address.
    UnmanagedAddress = 21, "unmanaged_address", Pass,
        "Nothing, if the Service's label service.kubernetes.io/service-proxy-name, or a device like NodeLocal DNSCache's, is meant.";
    /// The packet's source cannot be a client: loopback, multicast, broadcast, unspecified, an address of this node, or one whose route leads elsewhere.
    MartianSource = 22, "martian_source", Drop,
        "Look for who spoofs addresses behind the device.";
    /// A TCP reset or FIN is out of the connection's window: it is forwarded, and does not change the flow's state.
    OutOfWindow = 23, "out_of_window", Pass,
        "Nothing, unless it grows: then look for who forges resets.";
    /// A TCP segment that belongs to no connection, and can begin none: a reset, a FIN, or an answer to a SYN.
    InvalidState = 24, "invalid_state", Drop,
        "Nothing, unless it grows: then look for clients that keep connections for longer than their timeouts, or for port scans.";

    /// An encapsulated packet to a Service comes from no node of the cluster.
    ForeignTunnel = 25, "foreign_tunnel", Drop,
        "Look for who forges IP-in-IP packets. If the source is a node, look at its InternalIP: it has to send from there.";
    /// Another node encapsulated a packet to an endpoint that this node does not have, or has no longer.
    TunnelNoEndpoint = 26, "tunnel_no_endpoint", Drop,
        "Nothing, if it stays small: the client sends again. If it grows, compare what the agents of both nodes know.";
    /// An endpoint refused a connection, and another one can take it: the client sends its SYN again, and that one goes to the other.
    RefusalDropped = 27, "refusal_dropped", Drop,
        "Find out why the endpoint refuses: does it listen before it is ready? Give the pods a readiness probe.";
    /// An endpoint refused, or did not answer, connections of two clients in a row: new connections skip it for a while. Counted once for each ejection.
    EndpointEjected = 28, "endpoint_ejected", Pass,
        "Look at the endpoint (`ballast backend list` names it), at its readiness probe, and at the network to its node.";
    /// The connection's endpoint left the Service, whose removal policy is `reset`: the segment is answered with a TCP reset.
    EndpointLeft = 29, "endpoint_left", Reject,
        "Nothing: clients connect again. The Service's annotation ballast.io/removal-policy asks for it.";
    /// A connection with DSR that this node had no flow of went on to the endpoint that was selected before the endpoints changed: another node had it, or this one has lost its flow. Counted once for each connection.
    SecondChance = 30, "second_chance", Pass,
        "Nothing: it stayed with its endpoint. If it grows although no address moves between nodes, look whether flows are evicted (--max-flows).";
}

impl Reason {
    /// How many there are: the size of the `reasons` map.
    pub const COUNT: u32 = Self::ALL.len() as u32;

    /// Whether Ballast or its settings are the cause, and not the traffic or the configuration of a Service.
    pub const fn is_fault(self) -> bool {
        matches!(self, Self::FlowTableFull | Self::MapInconsistent | Self::RewriteFailed | Self::RejectFailed)
    }

    /// The reason of that number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

impl Verdict {
    /// The word in metrics, tables and JSON.
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
