//! Metrics of the API servers.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tokio::sync::watch;

use super::sample::{counter, gauge};
use proxy_core::model::{ApiServers, Watches};

/// Reads the state that the client publishes.
#[derive(Debug)]
pub(super) struct ApiServersCollector {
    pub servers: watch::Receiver<ApiServers>,
    pub watches: watch::Receiver<Watches>,
}

impl Collector for ApiServersCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let ApiServers { servers, active, failovers } = self.servers.borrow().clone();
        let rows = servers.into_iter().map(|server| {
            let is_asked = active.as_ref() == Some(&server);
            (vec![("server", server)], u64::from(is_asked))
        });
        let help = "Configured API servers: 1 for the server in use, 0 for the others";
        gauge(&mut encoder, "ballast_api_server", help, rows)?;
        let help = "Changes to another API server because the previous one did not answer";
        counter(&mut encoder, "ballast_api_server_failovers", help, [(Vec::new(), failovers)])?;
        let watches = self.watches.borrow().clone().into_iter();
        let rows = watches.map(|(resource, failure)| {
            (vec![("resource", resource.to_owned())], u32::from(failure.is_some()))
        });
        let help = "1 if the watch of the resource fails: its changes do not arrive";
        gauge(&mut encoder, "ballast_watch_failing", help, rows)
    }
}
