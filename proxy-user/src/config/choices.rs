//! Values of flags whose types belong to other modules, each with its help text.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use crate::programs::{PacketHook, TcxOrder, Xdp};
use proxy_cli::value::{DetectLocalMode, LogFormat};
use proxy_core::model::ForwardingMode;
use proxy_core::model::settings::{NodePortBind, SocketDrop, SocketLb, UnallocatedAddresses};

/// The values of a flag whose type belongs to another module or crate.
pub trait Choice: Clone + Send + Sync + 'static {
    /// Each value, with its word and its help text.
    const ALL: &'static [(Self, &'static str, &'static str)];
}

/// Returns the parser of a flag with such values.
pub fn choice<C: Choice>() -> impl TypedValueParser<Value = C> {
    let words = C::ALL.iter().map(|(_, word, help)| PossibleValue::new(word).help(help));
    PossibleValuesParser::new(words).try_map(|given| {
        let found = C::ALL.iter().find(|(_, word, _)| word.eq_ignore_ascii_case(&given));
        found.map(|(value, _, _)| value.clone()).ok_or("no such value")
    })
}

/// Implements [`Choice`] for each type: its variants, and the word and the help text of each.
macro_rules! choices {
    ($($choice:ident { $($variant:ident = $word:literal: $help:literal,)+ })+) => {$(
        impl $crate::config::choices::Choice for $choice {
            const ALL: &'static [(Self, &'static str, &'static str)] = &[$((Self::$variant, $word, $help)),+];
        }
    )+};
}

pub(super) use choices;

choices! {
    PacketHook {
        Auto = "auto": "TCX if the kernel has it (Linux 6.6), otherwise clsact",
        Tcx = "tcx": "TCX; fails if the kernel lacks it",
        Clsact = "clsact": "The clsact qdisc",
    }
    LogFormat {
        Text = "text": "Text lines",
        Json = "json": "One JSON object per line",
    }
    TcxOrder {
        Nest = "nest":
            "First at ingress, last at egress: other programs see endpoint addresses in both directions, never Service addresses",
        First = "first": "First on both: other programs see requests to endpoints, and replies from Services",
        Last = "last": "Last on both: other programs see requests to Services, and replies from endpoints",
    }
    Xdp {
        Auto = "auto":
            "On uplinks whose driver supports XDP; not on virtual devices and on NICs of virtual machines, where it costs more than it saves",
        Native = "native": "On every uplink whose driver supports XDP, including veth and virtio",
        Generic = "generic": "On every uplink, with generic XDP: not faster than tc; for tests",
        Off = "off": "On no device",
    }
    ForwardingMode {
        Snat = "snat": "With this node's address as source (SNAT); replies return through this node",
        Dsr = "dsr":
            "Encapsulated (IP in IP) to the endpoint's node, which answers the client directly. The endpoint sees the client's \
             address. SCTP uses snat",
        Hybrid = "hybrid": "TCP uses dsr, other protocols use snat",
    }
    SocketLb {
        All = "all": "Sockets of the node and of its pods",
        HostOnly = "host-only":
            "Sockets in the host network namespace. Rules inside pods (REDIRECT of a service mesh) see the Service address",
        Off = "off": "No sockets",
    }
    SocketDrop {
        Silent = "silent":
            "The call continues, as with kube-proxy; the packets are dropped until there is a usable endpoint",
        Fail = "fail": "The call fails immediately (ETIMEDOUT)",
    }
    UnallocatedAddresses {
        Drop = "drop": "Packets to such an address are dropped, and those to a port that a Service does not have are refused",
        Pass = "pass": "Both pass, and the node routes them like any other packet",
    }
    NodePortBind {
        Allow = "allow":
            "Yes, as with kube-proxy: the Service receives what is sent to the node port, and `ballast status` names the process's port",
        Refuse = "refuse": "No: bind fails with EADDRINUSE",
    }
    DetectLocalMode {
        ClusterCidr = "ClusterCIDR": "By the addresses of pods: --cluster-cidr",
        NodeCidr = "NodeCIDR": "By the addresses of pods: podCIDRs of the Node",
        BridgeInterface = "BridgeInterface": "By the bridge of pods: --pod-bridge-interface",
        InterfaceNamePrefix = "InterfaceNamePrefix": "By the device names of pods: --pod-interface-name-prefix",
    }
}
