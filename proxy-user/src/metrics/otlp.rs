//! Metrics of exported and lost telemetry (`--otlp-endpoint`).

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::sample::counter;
use crate::otlp::{Counts, Loss, Signal};

/// The counts of an exporter.
#[derive(Debug)]
pub(super) struct Telemetry(pub Arc<Counts>);

impl Collector for Telemetry {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let signal = |signal: Signal| vec![("signal", signal.label().to_owned())];
        let exported = Signal::ALL.map(|one| (signal(one), self.0.exported(one)));
        let help = "Log records and spans that the OpenTelemetry collector accepted";
        counter(&mut encoder, "ballast_otlp_exported", help, exported)?;
        let lost = Signal::ALL.into_iter().flat_map(|one| {
            Loss::ALL.map(|loss| {
                let mut labels = signal(one);
                labels.push(("reason", loss.label().to_owned()));
                (labels, self.0.lost(one, loss))
            })
        });
        let help = "Log records and spans that could not be exported";
        counter(&mut encoder, "ballast_otlp_lost", help, lost)
    }
}
