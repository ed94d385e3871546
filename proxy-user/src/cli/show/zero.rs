//! `ballast service zero`: stores the values of the counters in a file; the other commands show the difference.
//!
//! The kernel's counters are not reset, because Prometheus treats a falling counter as a restart. Like the maps, the file below
//! /run does not outlive the kernel.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use proxy_cli::selector::ServiceSelector;
use proxy_common::stats::ServiceStats;
use serde::{Deserialize, Serialize};

use super::error::ShowError;
use crate::cli::selector::SelectInMaps as _;
use crate::maps::view::Snapshot;

const FILE: &str = "zero.json";

/// The stored values of the counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zero {
    /// Connections, packets, bytes, reply packets and reply bytes, by [`service`].
    services: BTreeMap<String, [u64; 5]>,
    /// Connections, by [`backend`].
    backends: BTreeMap<String, u64>,
    /// Refusals, by [`service`] and the label of the reason.
    refusals: BTreeMap<String, u64>,
}

/// Returns a key that changes if the id is reassigned to another Service port, which then has no stored values.
fn service(id: u32, snapshot: &Snapshot) -> Option<String> {
    #[cfg(test)]
    tests::KEYS.set(tests::KEYS.get() + 1);
    let name = snapshot.names.get(&id)?;
    Some(format!("{id} {name} {} {}", name.protocol, name.family))
}

fn backend(id: u32, snapshot: &Snapshot) -> Option<String> {
    let row = snapshot.backends.get(&id)?;
    Some(format!("{id} {} {}", row.socket, service(row.service, snapshot)?))
}

/// Subtracts the stored value; a counter that is below it has restarted, and stays unchanged.
fn since(count: &mut u64, zero: Option<&u64>) {
    if let Some(zero) = zero.filter(|zero| **zero <= *count) {
        *count -= zero;
    }
}

impl Zero {
    /// Reads the stored values of a folder; empty before the first `zero`.
    pub fn read(folder: &Path) -> Result<Self, ShowError> {
        let path = folder.join(FILE);
        match fs::read_to_string(&path) {
            Ok(text) => {
                serde_json::from_str(&text).map_err(|error| ShowError::Zero { path, error: error.into() })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(ShowError::Zero { path, error }),
        }
    }

    /// Writes the values to a folder.
    pub fn write(&self, folder: &Path) -> Result<PathBuf, ShowError> {
        let path = folder.join(FILE);
        let new = folder.join(format!("{FILE}.new"));
        let written = fs::create_dir_all(folder)
            .and_then(|()| fs::write(&new, serde_json::to_vec_pretty(self)?))
            .and_then(|()| fs::rename(&new, &path));
        written.map(|()| path.clone()).map_err(|error| ShowError::Zero { path, error })
    }

    /// Stores the values of these Services. Returns the number of Service ports.
    pub fn take(&mut self, snapshot: &Snapshot, selector: &ServiceSelector) -> usize {
        let keys = |ids: &mut dyn Iterator<Item = &u32>, key: fn(u32, &Snapshot) -> Option<String>| {
            ids.filter_map(|id| Some((key(*id, snapshot)?, *id))).collect::<BTreeMap<_, _>>()
        };
        let services = keys(&mut snapshot.names.keys(), service);
        let backends = keys(&mut snapshot.backends.keys(), backend);
        // Forget removed Services and endpoints.
        self.services.retain(|key, _| services.contains_key(key));
        self.backends.retain(|key, _| backends.contains_key(key));
        self.refusals
            .retain(|key, _| key.rsplit_once(' ').is_some_and(|(service, _)| services.contains_key(service)));
        let taken: BTreeMap<u32, String> = services
            .into_iter()
            .filter(|(_, id)| selector.takes(*id, snapshot))
            .map(|(key, id)| (id, key))
            .collect();
        for (id, key) in &taken {
            let ServiceStats { connections, packets, bytes, reply_packets, reply_bytes } =
                snapshot.service_stats.get(id).copied().unwrap_or_default();
            self.services.insert(key.clone(), [connections, packets, bytes, reply_packets, reply_bytes]);
        }
        for ((id, reason), count) in &snapshot.refusals {
            if let Some(key) = taken.get(id) {
                self.refusals.insert(format!("{key} {}", reason.label()), *count);
            }
        }
        for (key, id) in backends {
            if snapshot.backends.get(&id).is_some_and(|row| taken.contains_key(&row.service)) {
                self.backends.insert(key, snapshot.backend_stats.get(&id).copied().unwrap_or_default());
            }
        }
        taken.len()
    }

    /// Returns the snapshot with the counts since the stored values.
    pub fn apply(&self, mut snapshot: Snapshot) -> Snapshot {
        if *self == Self::default() {
            return snapshot;
        }
        let mut stats = std::mem::take(&mut snapshot.service_stats);
        for (id, stats) in &mut stats {
            let zero = service(*id, &snapshot).and_then(|key| self.services.get(&key));
            let counts = [
                &mut stats.connections,
                &mut stats.packets,
                &mut stats.bytes,
                &mut stats.reply_packets,
                &mut stats.reply_bytes,
            ];
            for (count, zero) in counts.into_iter().zip(zero.into_iter().flatten()) {
                since(count, Some(zero));
            }
        }
        let mut backends = std::mem::take(&mut snapshot.backend_stats);
        for (id, count) in &mut backends {
            since(count, backend(*id, &snapshot).and_then(|key| self.backends.get(&key)));
        }
        let mut refusals = std::mem::take(&mut snapshot.refusals);
        for ((id, reason), count) in &mut refusals {
            let key = service(*id, &snapshot).map(|key| format!("{key} {}", reason.label()));
            since(count, key.and_then(|key| self.refusals.get(&key)));
        }
        Snapshot { service_stats: stats, backend_stats: backends, refusals, ..snapshot }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::cli::show::tests::cluster;

    thread_local! {
        /// How many keys of Service ports were made.
        pub(super) static KEYS: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn what_was_counted_before_is_taken_off_of_the_services_that_were_meant() {
        let selector = ServiceSelector {
            services: vec!["default/redis".parse().unwrap()],
            ..ServiceSelector::default()
        };
        let mut zero = Zero::default();
        assert_eq!(zero.take(&cluster(), &selector), 2, "IPv4 and IPv6");
        let mut later = cluster();
        later.service_stats.get_mut(&1).unwrap().connections += 3;
        *later.backend_stats.get_mut(&2).unwrap() += 1;
        let shown = zero.apply(later.clone());
        assert_eq!((shown.service_stats[&1].connections, shown.service_stats[&1].packets), (3, 0));
        assert_eq!((shown.backend_stats[&1], shown.backend_stats[&2]), (0, 1));
        let refused: Vec<u64> = shown.refusals.values().copied().collect();
        assert_eq!(refused, [0, 3], "the other Service keeps its count");
        // Another Service has the id, or the counter has restarted.
        later.names.get_mut(&1).unwrap().name = "other".to_owned();
        assert_eq!(zero.apply(later).service_stats[&1].connections, 15);
        let mut anew = cluster();
        anew.service_stats.get_mut(&1).unwrap().connections = 2;
        assert_eq!(zero.apply(anew).service_stats[&1].connections, 2);
    }

    #[test]
    fn each_service_and_backend_has_its_key_made_once() {
        let mut snapshot = cluster();
        for id in 1000..4000 {
            snapshot.names.insert(id, snapshot.names[&1].clone());
            snapshot.backends.insert(id, snapshot.backends[&1].clone());
        }
        let mut zero = Zero::default();
        for _ in 0..2 {
            KEYS.set(0);
            assert!(zero.take(&snapshot, &ServiceSelector::default()) > 3000);
            assert_eq!(KEYS.get(), snapshot.names.len() + snapshot.backends.len());
        }
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        assert_eq!(Zero::read(&run).unwrap(), Zero::default());
        let mut zero = Zero::default();
        zero.take(&cluster(), &ServiceSelector::default());
        let path = zero.write(&run).unwrap();
        assert_eq!(Zero::read(&run).unwrap(), zero);
        fs::write(&path, "x").unwrap();
        let error = Zero::read(&run).unwrap_err().to_string();
        assert!(error.contains("zero.json") && error.contains("--run-dir"), "{error}");
    }
}
