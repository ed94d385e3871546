//! Metrics of the audits.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::sample::counter;
use crate::audit::Audits;

/// Reads the counts at each scrape.
#[derive(Debug)]
pub(super) struct Found(pub Arc<Audits>);

impl Collector for Found {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.0.counts();
        let results = [("clean", counts.clean), ("repaired", counts.repaired), ("failed", counts.failed)]
            .map(|(result, count)| (vec![("result", result.to_owned())], count));
        let help = "Audits: comparisons of what is programmed with new lists from the API server";
        counter(&mut encoder, "ballast_api_audits", help, results)?;
        let differences = ["Service", "EndpointSlice", "frontend"].map(|what| {
            let count = counts.differences.get(what).copied().unwrap_or_default();
            (vec![("what", what.to_owned())], count)
        });
        let help = "Persistent differences that audits found and repaired: objects that the agent knew differently from the API \
                    server, and frontends that were different in the maps";
        counter(&mut encoder, "ballast_api_audit_repairs", help, differences)
    }
}
