//! The path MTU between nodes, while this node takes part in direct server return.

use tokio::sync::watch;

use crate::driver::Status;
use crate::host::tunnel_errors::TunnelErrors;

/// Keeps the sockets for errors about encapsulated packets open while a Service has DSR.
pub async fn learn(mut status: watch::Receiver<Status>, report: impl Fn(Option<String>)) {
    loop {
        if status.wait_for(|status| status.needs_nodes.is_some()).await.is_err() {
            return;
        }
        // Holds the sockets until no Service has DSR.
        let errors = TunnelErrors::open();
        report(errors.as_ref().err().map(|error| {
            format!(
                "the path MTU to other nodes is not learned, and long packets of clients may be lost: cannot open a raw \
                 socket: {error}; grant CAP_NET_RAW, which the chart does with forwardingMode dsr or hybrid"
            )
        }));
        if status.wait_for(|status| status.needs_nodes.is_none()).await.is_err() {
            return;
        }
        report(None);
    }
}
