//! How packets of clients outside of the cluster reach endpoints on other nodes.

use serde::Serialize;

use super::net::Protocol;

/// `--forwarding-mode`, and the annotation `ballast.io/forwarding-mode`; Cilium's names (`loadBalancer.mode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ForwardingMode {
    /// With SNAT to an address of this node; replies return through this node.
    #[default]
    Snat,
    /// Encapsulated to the endpoint's node, which answers the client directly. Not SCTP.
    Dsr,
    /// TCP as with [`ForwardingMode::Dsr`], other protocols as with [`ForwardingMode::Snat`].
    Hybrid,
}

impl ForwardingMode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::Snat, Self::Dsr, Self::Hybrid];

    /// Returns the name in settings, annotations, tables and JSON.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Snat => "snat",
            Self::Dsr => "dsr",
            Self::Hybrid => "hybrid",
        }
    }

    /// Returns the mode of that name, or `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.label() == name)
    }

    /// Whether packets of a protocol are encapsulated.
    pub const fn is_dsr(self, protocol: Protocol) -> bool {
        match self {
            Self::Snat => false,
            Self::Dsr => matches!(protocol, Protocol::Tcp | Protocol::Udp),
            Self::Hybrid => matches!(protocol, Protocol::Tcp),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_is_dsr_for_tcp_and_nothing_is_for_sctp() {
        let of = |mode: ForwardingMode| {
            [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].map(|protocol| mode.is_dsr(protocol))
        };
        assert_eq!(ForwardingMode::ALL.map(of), [[false; 3], [true, true, false], [true, false, false]]);
        assert_eq!(ForwardingMode::from_name("hybrid"), Some(ForwardingMode::Hybrid));
        assert_eq!(ForwardingMode::from_name("DSR"), None);
    }
}
