//! The counters of the programs, read from the maps at each scrape.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use proxy_common::reason::Reason;
use proxy_core::model::FlowState;

use super::bare::BareDevices;
use super::sample::{Labels, counter, gauge};
use crate::maps::view::{BackendState, NameRow, Overview, Snapshot, UsageRow, View, ViewError};
use crate::programs::hooks::Direction;
use crate::programs::{Attachment, attachments};

/// Reads the maps below one bpffs.
#[derive(Debug)]
pub struct DataPath {
    bpffs: PathBuf,
    /// Whether there are series for each Service port.
    of_services: bool,
    /// Selected devices without packet programs.
    bare: Arc<BareDevices>,
}

/// All values of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// The contents of the maps.
    pub overview: Overview,
    /// The attached programs.
    pub attachments: Vec<Attachment>,
    /// Indexes of the devices on which packets of other machines arrive.
    pub uplinks: BTreeSet<u32>,
    /// Names of the selected devices to which the packet programs could not be attached, by index.
    pub bare: BTreeMap<u32, String>,
}

impl DataPath {
    /// Reads the maps that are pinned below `bpffs`.
    pub fn new(bpffs: &Path, of_services: bool, bare: Arc<BareDevices>) -> Self {
        Self { bpffs: bpffs.to_owned(), of_services, bare }
    }

    fn read(&self) -> Result<Reading, ViewError> {
        let view = View::open(&self.bpffs)?;
        let mut overview = view.overview()?;
        if !self.of_services {
            // The series of a Service port are those of its name.
            overview.snapshot.names.clear();
        }
        let bare = self.bare.list().into_iter().map(|(ifindex, device)| (ifindex, device.name)).collect();
        Ok(Reading { overview, attachments: attachments(&self.bpffs), uplinks: view.uplinks()?, bare })
    }
}

impl Collector for DataPath {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let reading = self.read();
        let readable = u64::from(reading.is_ok());
        gauge(
            &mut encoder,
            "ballast_maps_readable",
            "1 if the maps could be read",
            [(Vec::new(), readable)],
        )?;
        match reading {
            Ok(reading) => reading.encode(&mut encoder),
            Err(error) => {
                tracing::debug!(%error, "cannot read the maps for /metrics");
                Ok(())
            }
        }
    }
}

impl Reading {
    /// Writes all metrics.
    pub fn encode(&self, e: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        self.encode_maps(e)?;
        self.encode_programs(e)?;
        self.encode_services(e)?;
        self.encode_refusals(e)?;
        let Snapshot { names, latency, .. } = &self.overview.snapshot;
        let measured = latency.iter().filter(|((_, backend), _)| *backend == 0);
        let measured = measured.filter_map(|((id, _), entry)| Some((port(names.get(id)?), *entry)));
        super::latency::encode(e, &measured.collect::<Vec<_>>())
    }

    fn encode_maps(&self, e: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let map = |row: &UsageRow| vec![("map", row.name.to_owned())];
        let used = self.overview.maps.iter().filter_map(|row| Some((map(row), row.used?)));
        gauge(e, "ballast_map_entries", "Map entries in use", used)?;
        // Socket-local storage has no capacity.
        let capacity = self.overview.maps.iter().filter(|row| row.capacity != 0);
        let capacity = capacity.map(|row| (map(row), row.capacity));
        gauge(e, "ballast_map_capacity", "Maximum number of map entries", capacity)?;
        let memory = self.overview.maps.iter().filter_map(|row| Some((map(row), row.memory?)));
        gauge(e, "ballast_map_memory_bytes", "Kernel memory of the map", memory)?;
        let flows = FlowState::ALL.into_iter().map(|state| {
            (
                vec![("state", state.label().to_owned())],
                self.overview.flows.states.get(&state).copied().unwrap_or_default(),
            )
        });
        gauge(e, "ballast_flows", "Connections that the packet programs track", flows)?;
        let backends = BackendState::ALL.into_iter().map(|state| {
            let count =
                self.overview.snapshot.backends.values().filter(|row| row.state == state).count() as u64;
            (vec![("state", state.label().to_owned())], count)
        });
        gauge(e, "ballast_backends", "Backends: endpoints of Service ports", backends)?;
        let left = self.overview.snapshot.left.values().sum::<u64>();
        let help = "Connections of the packet path to removed endpoints";
        gauge(e, "ballast_draining_flows", help, [(Vec::new(), left)])
    }

    fn encode_programs(&self, e: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // Each pod has a device: these are counted, and have no series of their own.
        let is_single = |one: &&Attachment| one.ifindex.is_none_or(|ifindex| self.uplinks.contains(&ifindex));
        let mut local: BTreeMap<(&str, bool), u64> = BTreeMap::new();
        for one in self.attachments.iter().filter(|one| !is_single(one)) {
            *local.entry((one.program, one.is_attached())).or_default() += 1;
        }
        let programs: BTreeSet<&str> = local.keys().map(|(program, _)| *program).collect();
        let states =
            programs.into_iter().flat_map(|program| [true, false].map(|attached| (program, attached)));
        let counts = states.map(|(program, attached)| {
            let state = if attached { "attached" } else { "detached" };
            let labels = vec![("program", program.to_owned()), ("state", state.to_owned())];
            (labels, local.get(&(program, attached)).copied().unwrap_or_default())
        });
        let help = "Devices of pods on which the program is attached, and those from which it is gone";
        gauge(e, "ballast_local_programs", help, counts)?;
        let attached = self.attachments.iter().filter(is_single).map(|one| {
            let device = one.ifindex.and(one.place.clone()).unwrap_or_default();
            let labels =
                vec![("hook", one.hook.clone()), ("program", one.program.to_owned()), ("device", device)];
            (labels, u32::from(one.is_attached()))
        });
        let has = |ifindex: u32, program: &str| {
            self.attachments.iter().any(|one| one.ifindex == Some(ifindex) && one.program == program)
        };
        let bare = self.bare.iter().filter(|(ifindex, _)| self.uplinks.contains(ifindex));
        let bare = bare.flat_map(|one| Direction::ALL.map(|direction| (one, direction)));
        let bare = bare.filter(|((ifindex, _), direction)| !has(**ifindex, direction.program()));
        let bare = bare.map(|((ifindex, name), direction)| {
            let hook = format!("{direction}_{ifindex}");
            let program = direction.program().to_owned();
            (vec![("hook", hook), ("program", program), ("device", name.clone())], 0)
        });
        let help = "1 if the program is attached to the hook of an uplink or cgroup; 0 if it could not be attached, or if the \
                    program, device or cgroup is gone";
        gauge(e, "ballast_program_attached", help, attached.chain(bare))?;
        // The kernel counts by program, not by hook: a program that is attached to two hooks must not count twice.
        let programs: BTreeMap<u32, &Attachment> =
            self.attachments.iter().map(|one| (one.program_id, one)).collect();
        let mut total: BTreeMap<&str, (u64, f64)> = BTreeMap::new();
        for row in programs.into_values() {
            let (runs, seconds) = total.entry(row.program).or_default();
            *runs += row.runs;
            *seconds += row.run_time.as_secs_f64();
        }
        let program = |name: &str| vec![("program", name.to_owned())];
        let runs = total.iter().map(|(name, (runs, _))| (program(name), *runs));
        let help = "Runs of the program; 0 unless kernel.bpf_stats_enabled is set";
        counter(e, "ballast_program_runs", help, runs)?;
        let seconds = total.iter().map(|(name, (_, seconds))| (program(name), *seconds));
        counter(
            e,
            "ballast_program_run_seconds",
            "Time spent in runs of the program; 0 unless kernel.bpf_stats_enabled is set",
            seconds,
        )
    }

    fn encode_services(&self, e: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Snapshot { names, service_stats, .. } = &self.overview.snapshot;
        let rows: Vec<_> =
            names.iter().filter_map(|(id, name)| Some((port(name), service_stats.get(id)?))).collect();
        let connections = rows.iter().map(|(labels, stats)| (labels.clone(), stats.connections));
        let help = "New connections: translated sockets and new flows";
        counter(e, "ballast_service_connections", help, connections)?;
        let packets = rows.iter().flat_map(|(labels, stats)| {
            [
                (with(labels, "direction", "forward"), stats.packets),
                (with(labels, "direction", "reply"), stats.reply_packets),
            ]
        });
        let help = "Packets translated by packet programs, without the traffic of translated sockets";
        counter(e, "ballast_service_packets", help, packets)?;
        let bytes = rows.iter().flat_map(|(labels, stats)| {
            [
                (with(labels, "direction", "forward"), stats.bytes),
                (with(labels, "direction", "reply"), stats.reply_bytes),
            ]
        });
        counter(
            e,
            "ballast_service_bytes",
            "Bytes of translated packets, with IP headers, without the traffic of translated sockets",
            bytes,
        )?;
        let mut serving: BTreeMap<u32, u64> = names.keys().map(|id| (*id, 0)).collect();
        for row in self.overview.snapshot.backends.values().filter(|row| row.state == BackendState::Active) {
            serving.entry(row.service).and_modify(|count| *count += 1);
        }
        let endpoints = serving.iter().filter_map(|(id, count)| Some((port(names.get(id)?), *count)));
        gauge(e, "ballast_service_endpoints", "Usable endpoints of a Service port", endpoints)?;
        let ejected = u64::try_from(self.overview.snapshot.ejected.len()).unwrap_or(u64::MAX);
        let help = "Ejected endpoints: new connections currently skip them";
        gauge(e, "ballast_ejected_endpoints", help, [(Vec::new(), ejected)])?;
        let ejections = self.overview.reasons.get(&Reason::EndpointEjected).copied().unwrap_or_default();
        let help = "Ejections of endpoints that refused connections of two clients in a row";
        counter(e, "ballast_ejections", help, [(Vec::new(), ejections)])
    }

    fn encode_refusals(&self, e: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let reasons =
            self.overview.reasons.iter().map(|(reason, count)| (because(Vec::new(), *reason), *count));
        counter(
            e,
            "ballast_reasons",
            "Packets and socket calls that were refused, dropped or passed untranslated, by reason",
            reasons,
        )?;
        let refusals = self.overview.snapshot.refusals.iter().filter_map(|((service, reason), count)| {
            Some((because(port(self.overview.snapshot.names.get(service)?), *reason), *count))
        });
        counter(
            e,
            "ballast_service_refusals",
            "Packets and socket calls that were refused, dropped or passed untranslated, by Service port and reason",
            refusals,
        )
    }
}

pub(super) fn port(name: &NameRow) -> Labels {
    vec![
        ("namespace", name.namespace.clone()),
        ("name", name.name.clone()),
        ("port", name.port.clone()),
        ("protocol", name.protocol.to_string()),
        ("ip_family", name.family.to_string()),
    ]
}

fn because(mut labels: Labels, reason: Reason) -> Labels {
    labels.push(("reason", reason.label().to_owned()));
    labels.push(("verdict", reason.verdict().label().to_owned()));
    labels
}

fn with(labels: &Labels, key: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((key, value.to_owned()));
    labels
}
