//! The path MTU between nodes, while this node takes part in direct server return.

use tokio::sync::watch;

use crate::driver::Status;
use crate::host::tunnel_errors::TunnelErrors;

/// Keeps the sockets for errors about encapsulated packets open while a Service has DSR.
pub async fn learn(mut status: watch::Receiver<Status>, report: impl Fn(Option<String>)) {
    let mut held = None;
    loop {
        if status.borrow_and_update().needs_nodes.is_none() {
            held = None;
            report(None);
        } else if held.is_none() {
            match TunnelErrors::open() {
                Ok(errors) => {
                    held = Some(errors);
                    report(None);
                }
                Err(error) => report(Some(format!(
                    "the path MTU to other nodes is not learned, and long packets of clients may be lost: cannot open a raw \
                     socket: {error}; grant CAP_NET_RAW, which the chart does with forwardingMode dsr or hybrid"
                ))),
            }
        }
        if status.changed().await.is_err() {
            return;
        }
    }
}
