//! Runs the demo's clients and counts their answers by pod, and their failures.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result, ensure};

use super::client::{FAILED, HELD};

/// Answers and failures of clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Answers on new connections, for each pod.
    pub pods: BTreeMap<String, u64>,
    /// Answers on connections that stay open.
    pub held: u64,
    /// Number of failed requests.
    pub failed: u64,
    /// Reason of the last failure.
    pub reason: String,
}

impl Tally {
    /// Counts one output line of a client.
    fn count(&mut self, line: &str) {
        if let Some(reason) = line.strip_prefix(FAILED) {
            self.failed += 1;
            reason.clone_into(&mut self.reason);
        } else if line.starts_with(HELD) {
            self.held += 1;
        } else {
            *self.pods.entry(line.to_owned()).or_default() += 1;
        }
    }

    /// Returns the number of new connections that were answered.
    pub(super) fn connections(&self) -> u64 {
        self.pods.values().sum()
    }

    /// Returns how many new connections this pod answered.
    pub(super) fn of(&self, pod: &str) -> u64 {
        self.pods.get(pod).copied().unwrap_or_default()
    }

    /// Returns an error if a request failed.
    pub(super) fn check_none_failed(&self) -> Result<()> {
        ensure!(self.failed == 0, "{} requests failed, the last one: {}", self.failed, self.reason);
        Ok(())
    }

    /// Adds the counts of another client.
    pub(super) fn add(&mut self, other: Self) {
        for (pod, count) in other.pods {
            *self.pods.entry(pod).or_default() += count;
        }
        self.held += other.held;
        self.failed += other.failed;
        if !other.reason.is_empty() {
            self.reason = other.reason;
        }
    }

    /// Returns the counts since `earlier`.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        Self {
            pods: self.pods.iter().map(|(pod, count)| (pod.clone(), count - earlier.of(pod))).collect(),
            held: self.held - earlier.held,
            failed: self.failed - earlier.failed,
            reason: self.reason.clone(),
        }
    }
}

/// A running client. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Traffic {
    child: Child,
    tally: Arc<Mutex<Tally>>,
    reader: Option<thread::JoinHandle<()>>,
}

impl Traffic {
    /// Starts a client.
    pub(super) fn start(mut client: Command) -> Result<Self> {
        let mut child = client
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a client of the demo")?;
        let output = child.stdout.take().context("a client without output")?;
        let tally = Arc::new(Mutex::new(Tally::default()));
        let counting = Arc::clone(&tally);
        let reader = thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                counting.lock().unwrap_or_else(PoisonError::into_inner).count(&line);
            }
        });
        Ok(Self { child, tally, reader: Some(reader) })
    }

    /// Returns the counts so far.
    pub(super) fn tally(&self) -> Tally {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the client ends by itself, and returns its counts.
    pub(super) fn finish(mut self) -> Result<Tally> {
        self.child.wait().context("cannot wait for a client of the demo")?;
        self.join();
        Ok(self.tally())
    }

    /// Ends the client, and returns its counts.
    pub(super) fn stop(mut self) -> Tally {
        self.end();
        self.tally()
    }

    fn end(&mut self) {
        // The client may have ended by itself; then there is no process to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.join();
    }

    fn join(&mut self) {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns the sum of all clients' counts so far.
pub(super) fn sum(traffic: &[Traffic]) -> Tally {
    let mut all = Tally::default();
    for client in traffic {
        all.add(client.tally());
    }
    all
}

/// Ends the clients, and returns the sum of their counts.
pub(super) fn stop(traffic: impl IntoIterator<Item = Traffic>) -> Tally {
    let mut all = Tally::default();
    for client in traffic {
        all.add(client.stop());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_by_what_they_say() {
        let mut client = Command::new("printf");
        client.arg("redis-0\\nheld redis-1\\nredis-2\\nfailed no route\\nredis-0\\n");
        let tally = Traffic::start(client).unwrap().finish().unwrap();
        assert_eq!((tally.of("redis-0"), tally.of("redis-1"), tally.of("redis-2")), (2, 0, 1));
        assert_eq!((tally.connections(), tally.held, tally.failed), (3, 1, 1));
        assert_eq!(tally.reason, "no route");
        let mut later = tally.clone();
        later.count("redis-2");
        assert_eq!(later.since(&tally).pods, BTreeMap::from([("redis-0".into(), 0), ("redis-2".into(), 1)]));
    }

    #[test]
    fn a_client_without_end_is_ended() {
        let mut client = Command::new("sh");
        client.args(["-c", "echo redis-0; exec sleep 60"]);
        let traffic = Traffic::start(client).unwrap();
        while traffic.tally().connections() == 0 {
            thread::yield_now();
        }
        assert_eq!(traffic.stop().connections(), 1);
    }
}
