//! How long flows may be silent.

use crate::config::value;
use crate::model::settings::GivenFlowTimeouts;

/// One flag for each: what it is about, its field here and in the settings, its variable, its default.
macro_rules! timeouts {
    ($($(#[doc = $doc:literal])+ $name:ident is $timeout:ident, $variable:literal;)+) => {
        /// How long flows may be silent, in seconds.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
        pub struct TimeoutArgs {
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $variable, value_name = "DURATION", value_parser = value::flow_timeout,
                    help_heading = "Timing")]
                pub $name: Option<u32>,
            )+
        }

        impl From<TimeoutArgs> for GivenFlowTimeouts {
            fn from(args: TimeoutArgs) -> Self {
                Self { $($timeout: args.$name,)+ }
            }
        }
    };
}

timeouts! {
    /// How long a TCP connection of the packet path may wait for its backend's first answer. Default: 60s.
    flow_timeout_tcp_syn_sent is tcp_syn_sent, "BALLAST_FLOW_TIMEOUT_TCP_SYN_SENT";
    /// How long one may wait for its client's answer to that. Default: 60s.
    flow_timeout_tcp_syn_recv is tcp_syn_recv, "BALLAST_FLOW_TIMEOUT_TCP_SYN_RECV";
    /// How long an established one may be silent. Default: kube-proxy's conntrack.tcpEstablishedTimeout if it is given,
    /// or 24h.
    flow_timeout_tcp_established is tcp_established, "BALLAST_FLOW_TIMEOUT_TCP_ESTABLISHED";
    /// How long one may be silent that one end has closed. Default: kube-proxy's conntrack.tcpCloseWaitTimeout if it is
    /// given, or 1h.
    flow_timeout_tcp_close_wait is tcp_close_wait, "BALLAST_FLOW_TIMEOUT_TCP_CLOSE_WAIT";
    /// How long one is kept that both ends have closed. Default: 2m.
    flow_timeout_tcp_time_wait is tcp_time_wait, "BALLAST_FLOW_TIMEOUT_TCP_TIME_WAIT";
    /// How long one is kept that was reset. Default: 2m.
    flow_timeout_tcp_close is tcp_close, "BALLAST_FLOW_TIMEOUT_TCP_CLOSE";
    /// How long UDP may be silent before its first answer and after one exchange. Default: kube-proxy's
    /// conntrack.udpTimeout if it is given, or 30s.
    flow_timeout_udp is udp, "BALLAST_FLOW_TIMEOUT_UDP";
    /// How long UDP may be silent after more than one exchange. Default: kube-proxy's conntrack.udpStreamTimeout if it is
    /// given, or 2m.
    flow_timeout_udp_stream is udp_stream, "BALLAST_FLOW_TIMEOUT_UDP_STREAM";
}
