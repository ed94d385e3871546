//! Timeouts of flows.

use proxy_cli::value;
use proxy_core::model::settings::FlowTimeouts;

/// Defines one flag for each timeout: its help text, its field here and in [`FlowTimeouts`], its environment variable.
macro_rules! timeouts {
    ($($(#[doc = $doc:literal])+ $name:ident is $timeout:ident, $variable:literal;)+) => {
        /// The given timeouts of flows, in seconds.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
        pub struct Timeouts {
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $variable, value_name = "DURATION", value_parser = value::flow_timeout,
                    help_heading = "Timing")]
                pub $name: Option<u32>,
            )+
        }

        impl Timeouts {
            /// Returns these timeouts; those that were not given are taken from `below`.
            pub fn over(self, below: FlowTimeouts) -> FlowTimeouts {
                FlowTimeouts { $($timeout: self.$name.unwrap_or(below.$timeout),)+ }
            }
        }
    };
}

timeouts! {
    /// Timeout of a TCP flow whose backend has not answered the SYN. Default: 60s.
    flow_timeout_tcp_syn_sent is tcp_syn_sent, "BALLAST_FLOW_TIMEOUT_TCP_SYN_SENT";
    /// Timeout of a half-open TCP flow: the backend has answered, and the client has not. Default: 60s.
    flow_timeout_tcp_syn_recv is tcp_syn_recv, "BALLAST_FLOW_TIMEOUT_TCP_SYN_RECV";
    /// Timeout of an established TCP flow without packets. Default: kube-proxy's conntrack.tcpEstablishedTimeout if it
    /// is given, otherwise 24h.
    flow_timeout_tcp_established is tcp_established, "BALLAST_FLOW_TIMEOUT_TCP_ESTABLISHED";
    /// Timeout of a TCP flow that one side has closed. Default: kube-proxy's conntrack.tcpCloseWaitTimeout if it is
    /// given, otherwise 1h.
    flow_timeout_tcp_close_wait is tcp_close_wait, "BALLAST_FLOW_TIMEOUT_TCP_CLOSE_WAIT";
    /// Timeout of a TCP flow that both sides have closed. Default: 2m.
    flow_timeout_tcp_time_wait is tcp_time_wait, "BALLAST_FLOW_TIMEOUT_TCP_TIME_WAIT";
    /// Timeout of a TCP flow that was reset. Default: 2m.
    flow_timeout_tcp_close is tcp_close, "BALLAST_FLOW_TIMEOUT_TCP_CLOSE";
    /// Timeout of a UDP flow without a reply, or with one request and one reply. Default: kube-proxy's
    /// conntrack.udpTimeout if it is given, otherwise 30s.
    flow_timeout_udp is udp, "BALLAST_FLOW_TIMEOUT_UDP";
    /// Timeout of a UDP flow after more than one request and reply. Default: kube-proxy's conntrack.udpStreamTimeout if
    /// it is given, otherwise 2m.
    flow_timeout_udp_stream is udp_stream, "BALLAST_FLOW_TIMEOUT_UDP_STREAM";
}
