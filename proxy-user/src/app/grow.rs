//! Lets the flow tables grow as they fill up.

use std::path::{Path, PathBuf};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::task::spawn_blocking;

use crate::maps::flow_growth::{FlowGrowth, Grown};

/// So often, a table of 16,384 entries of which a quarter is in use is not full before the next pass, at 240,000 new flows a
/// second.
const PERIOD: Duration = Duration::from_millis(50);
/// The pause while the maps cannot be read.
const RETRY: Duration = Duration::from_secs(1);

/// Passes the problems to `report` when they change, and counts each failure.
pub async fn run(folder: PathBuf, failures: Counter, report: impl Fn(Vec<String>) + Send + 'static) {
    let growth = Growth { tables: None, problems: Vec::new(), failures };
    // The thread ends with the process.
    let _ = spawn_blocking(move || repeat(growth, &folder, report)).await;
}

fn repeat(mut growth: Growth, folder: &Path, report: impl Fn(Vec<String>)) {
    loop {
        if let Some(problems) = growth.pass(folder) {
            problems.iter().for_each(|problem| tracing::error!("{problem}; retrying"));
            report(problems.to_vec());
        }
        std::thread::sleep(if growth.tables.is_some() { PERIOD } else { RETRY });
    }
}

/// The flow tables, and their last problems.
struct Growth {
    /// `None`: the maps could not be read.
    tables: Option<FlowGrowth>,
    problems: Vec<String>,
    failures: Counter,
}

impl Growth {
    /// Lets the tables grow; returns the problems if they have changed.
    fn pass(&mut self, folder: &Path) -> Option<&[String]> {
        let problems = self.grow(folder).unwrap_or_else(|error| {
            self.tables = None;
            self.failures.inc();
            vec![format!("cannot let the flow tables grow: {error}")]
        });
        let is_new = problems != self.problems;
        self.problems = problems;
        is_new.then_some(self.problems.as_slice())
    }

    fn grow(&mut self, folder: &Path) -> std::io::Result<Vec<String>> {
        let tables = match &mut self.tables {
            Some(tables) => tables,
            None => self.tables.insert(FlowGrowth::open(folder)?),
        };
        for Grown { family, entries, moved } in tables.grow()? {
            tracing::info!(family, entries, moved, "the flow table has grown");
        }
        self.failures.inc_by(tables.take_failures());
        Ok(tables.problems())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_that_cannot_be_read_are_reported_once_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut growth = Growth { tables: None, problems: Vec::new(), failures: Counter::default() };
        let first = growth.pass(folder.path()).map(<[_]>::to_vec).unwrap_or_default();
        assert!(first.len() == 1 && first[0].starts_with("cannot let the flow tables grow: "), "{first:?}");
        for _ in 0..9 {
            assert_eq!(growth.pass(folder.path()), None);
        }
        assert_eq!(growth.failures.get(), 10);
    }
}
