//! The words of flags whose values are settings of other modules, each with its help text.

use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::config::otlp::Telemetry;
use crate::config::page::Shows;
use crate::config::paths::Ejection;
use crate::config::value::{DetectLocalMode, LogFormat};
use crate::model::ForwardingMode;
use crate::model::settings::{SocketDrop, SocketLb};
use crate::programs::{PacketHook, TcxOrder, Xdp};

/// Makes a flag's value of each type: its variants, with the word for each and what it means.
macro_rules! choices {
    ($($choice:ident { $($variant:ident = $word:literal: $help:literal,)+ })+) => {$(
        impl ValueEnum for $choice {
            fn value_variants<'a>() -> &'a [Self] {
                &[$(Self::$variant),+]
            }

            fn to_possible_value(&self) -> Option<PossibleValue> {
                let (word, help) = match self {
                    $(Self::$variant => ($word, $help),)+
                };
                Some(PossibleValue::new(word).help(help))
            }
        }
    )+};
}

choices! {
    PacketHook {
        Auto = "auto": "TCX where the kernel has it (Linux 6.6), clsact elsewhere",
        Tcx = "tcx": "TCX or nothing",
        Clsact = "clsact": "The clsact qdisc",
    }
    LogFormat {
        Text = "text": "For people",
        Json = "json": "For machines: one object on a line",
    }
    TcxOrder {
        Nest = "nest":
            "First at ingress, last at egress: the programs of others see endpoints both ways, never Services",
        First = "first": "First on both: others see requests to endpoints, and replies of Services",
        Last = "last": "Last on both: others see requests to Services, and replies of endpoints",
    }
    Xdp {
        Auto = "auto":
            "On uplinks whose driver runs XDP programs; never on virtual devices, where it costs more than it saves",
        Native = "native": "On every uplink whose driver runs XDP programs, veth too",
        Generic = "generic": "On every uplink, by the kernel's stack: no faster than tc; for tests",
        Off = "off": "Nowhere",
    }
    ForwardingMode {
        Snat = "snat": "Under this node's address; replies come back through it",
        Dsr = "dsr":
            "Encapsulated (IP in IP) to the endpoint's node, which answers the client directly: the endpoint sees the client's \
             address. SCTP as with snat",
        Hybrid = "hybrid": "TCP as with dsr, all else as with snat",
    }
    Ejection {
        On = "on":
            "For a second after two clients met a failure in a row, longer each time; never the last endpoint",
        Off = "off": "As with kube-proxy, which leads connections to an endpoint as long as it is ready",
    }
    Telemetry {
        Traces = "traces": "Spans of the agent's work: lists, syncs with plan and apply, audits",
        Logs = "logs": "Lines of its log",
        Events = "events": "What `ballast monitor` shows: refusals, drops, passes, and new flows (--otlp-sample)",
    }
    Shows {
        Off = "off": "There is no page",
        Services = "services": "What /metrics and /problems tell: rates by Service and by reason",
        All = "all": "Addresses of clients and endpoints too, and examples of what was refused",
    }
    SocketLb {
        All = "all": "Those of the node and of its pods",
        HostOnly = "host-only":
            "Those in the node's own network namespace: rules inside pods (a mesh's REDIRECT) meet the Service's address",
        Off = "off": "None",
    }
    SocketDrop {
        Silent = "silent":
            "It goes on, as with kube-proxy: its packets are dropped until an endpoint may receive them",
        Fail = "fail": "It fails at once (ETIMEDOUT)",
    }
    DetectLocalMode {
        ClusterCidr = "ClusterCIDR": "By their addresses: --cluster-cidr",
        NodeCidr = "NodeCIDR": "By their addresses: the Node's podCIDRs",
        BridgeInterface = "BridgeInterface": "By their bridge: --pod-bridge-interface",
        InterfaceNamePrefix = "InterfaceNamePrefix": "By their devices' names: --pod-interface-name-prefix",
    }
}
