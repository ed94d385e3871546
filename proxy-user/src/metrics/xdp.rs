//! Metrics of XDP on the uplinks.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::sample::gauge;
use crate::programs::{AttachedXdp, XdpDevices};

/// The XDP modes of the uplinks.
#[derive(Debug)]
pub(super) struct Uplinks(pub Arc<XdpDevices>);

impl Collector for Uplinks {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let rows = self.0.list().into_iter().flat_map(|row| {
            [AttachedXdp::Native, AttachedXdp::Generic, AttachedXdp::None].map(|mode| {
                let labels = vec![("device", row.device.clone()), ("mode", mode.label().to_owned())];
                (labels, u64::from(row.mode == mode))
            })
        });
        gauge(&mut encoder, "ballast_xdp", "XDP mode of an uplink: 1 for the mode in use", rows)
    }
}
