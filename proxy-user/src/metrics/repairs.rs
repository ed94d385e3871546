//! Metrics of programs and pins that the agent restored.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::sample::counter;
use crate::programs::Repairs;

/// Reads the counts at each scrape.
#[derive(Debug)]
pub(super) struct Put(pub Arc<Repairs>);

impl Collector for Put {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let samples = self.0.counts().map(|(what, count)| (vec![("what", what.to_owned())], count));
        let help = "Programs and pins that were detached or removed externally and that the agent restored; packet programs by device";
        counter(&mut encoder, "ballast_repairs", help, samples)
    }
}
