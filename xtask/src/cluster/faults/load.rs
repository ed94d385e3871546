//! A client process: it sends requests to all its targets in parallel until its standard input ends, and counts the results.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _, Write as _};
use std::ops::AddAssign;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::probe::{Kind, Prober, Target};
use crate::cluster::plan::Node;
use crate::exec::Cmd;

/// Pause after a request on a new connection.
const PAUSE: Duration = Duration::from_millis(10);
/// Pause after a request of any other kind.
const PAUSE_OTHER: Duration = Duration::from_millis(100);
/// Number of problems that a client describes.
const MAX_FAILURES_SHOWN: usize = 20;

/// A client: where it runs, and its targets.
#[derive(Debug)]
pub(super) struct Client {
    /// Description for people.
    pub name: String,
    /// Node whose `ballast explain` predicts the endpoints of its connections.
    pub node: Node,
    /// The client as an argument of `ballast explain`.
    pub who: String,
    /// Command that runs its arguments where the client is.
    pub workdir: Cmd,
    /// Targets of its requests.
    pub targets: Vec<Target>,
}

/// Results of the requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Count {
    /// Number of requests with an answer.
    pub answered: u64,
    /// Number of requests without an answer.
    pub failed: u64,
    /// Number of these that a RST ended.
    pub reset: u64,
    /// Number of SYNs that were retransmitted.
    pub syns: u64,
    /// Number of answers from another pod than before although the pod must not change.
    pub moved: u64,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.answered += other.answered;
        self.failed += other.failed;
        self.reset += other.reset;
        self.syns += other.syns;
        self.moved += other.moved;
    }
}

/// Results of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Counts of each kind of request.
    pub kinds: BTreeMap<Kind, Count>,
    /// Time, target and reason of the first problems.
    pub failures: Vec<String>,
    /// Pods that answered, for each client and target.
    pub by: BTreeMap<String, BTreeSet<String>>,
}

impl Tally {
    /// Returns the sum of both.
    pub(super) fn and(mut self, other: Self) -> Self {
        for (kind, count) in other.kinds {
            *self.kinds.entry(kind).or_default() += count;
        }
        self.failures.extend(other.failures);
        for (target, names) in other.by {
            self.by.entry(target).or_default().extend(names);
        }
        self
    }

    /// Returns the counts of these kinds.
    pub(super) fn of(&self, kinds: &[Kind]) -> Count {
        let mut sum = Count::default();
        kinds.iter().filter_map(|kind| self.kinds.get(kind)).for_each(|count| sum += *count);
        sum
    }

    /// Returns the counts of all kinds.
    pub(super) fn total(&self) -> Count {
        let mut sum = Count::default();
        self.kinds.values().for_each(|count| sum += *count);
        sum
    }

    fn note(&mut self, target: &Target, prober: &mut Prober<'_>) {
        let start = Instant::now();
        let asked = prober.ask();
        let count = self.kinds.entry(target.kind).or_default();
        let trouble = match asked {
            Ok(answer) => {
                count.answered += 1;
                count.syns += u64::from(answer.syns);
                count.moved += u64::from(answer.moved);
                let what = match (answer.syns, answer.moved) {
                    (0, false) => None,
                    (0, true) => Some(format!("`{}` answered, another one before", answer.by)),
                    (syns, _) => {
                        Some(format!("{syns} SYNs sent again, from {} to `{}`", answer.from, answer.by))
                    }
                };
                self.by.entry(target.to_string()).or_default().insert(answer.by);
                what
            }
            Err(error) => {
                count.failed += 1;
                count.reset += u64::from(is_reset(&error));
                Some(format!("{error:#}"))
            }
        };
        if let Some(what) = trouble.filter(|_| self.failures.len() < MAX_FAILURES_SHOWN) {
            let (now, took) = (jiff::Timestamp::now(), start.elapsed().as_secs_f64());
            self.failures.push(format!("{now:.3} {target} after {took:.3} s: {what}"));
        }
    }
}

fn is_reset(error: &anyhow::Error) -> bool {
    let kinds = error.chain().filter_map(|cause| Some(cause.downcast_ref::<io::Error>()?.kind()));
    kinds.into_iter().any(|kind| matches!(kind, io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe))
}

/// Asks servers for their names until standard input ends, then prints the results as JSON. One thread makes the new
/// connections to their targets in turn; every other target has its own thread.
pub fn load(targets: &[Target]) -> Result<()> {
    static ENDED: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        ENDED.store(true, Ordering::Relaxed);
    });
    let (new, others): (Vec<_>, Vec<_>) = targets.iter().partition(|target| target.kind == Kind::New);
    let mut groups: Vec<(Vec<&Target>, Duration)> =
        others.into_iter().map(|target| (vec![target], PAUSE_OTHER)).collect();
    if !new.is_empty() {
        groups.push((new, PAUSE));
    }
    let ask = |(group, pause): (Vec<&Target>, Duration)| {
        let mut tally = Tally::default();
        let mut probers: Vec<_> = group.into_iter().map(|target| (target, Prober::new(target))).collect();
        while !ENDED.load(Ordering::Relaxed) {
            for (target, prober) in &mut probers {
                tally.note(target, prober);
                sleep(pause);
            }
        }
        tally
    };
    let all = scope(|scope| {
        let clients: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || ask(group))).collect();
        let tallies = clients.into_iter().filter_map(|client| client.join().ok());
        tallies.fold(Tally::default(), Tally::and)
    });
    let text = serde_json::to_string(&all).context("cannot write the tally")?;
    writeln!(io::stdout(), "{text}").context("the reader is gone")
}

/// A running client process.
#[derive(Debug)]
pub(super) struct LoadGenerator {
    name: String,
    child: Child,
}

impl LoadGenerator {
    /// Starts a client; `workdir` is a command that runs its arguments in some place.
    pub(super) fn start(name: String, workdir: Cmd, targets: &[Target]) -> Result<Self> {
        let us = std::env::current_exe().context("cannot find our own program")?;
        let mut command: Command = workdir
            .arg(us)
            .args(["test", "cluster", "knock"])
            .args(targets.iter().map(Target::to_string))
            .into_std();
        // Ctrl-C on a terminal goes to its whole process group: the client has to stay, and print its results.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        Ok(Self { name, child: command.spawn().context("cannot start a client")? })
    }

    /// Ends the client, and returns its results.
    pub(super) fn stop(mut self) -> Result<Tally> {
        drop(self.child.stdin.take());
        let output = self.child.wait_with_output().context("cannot wait for a client")?;
        let mut tally: Tally = serde_json::from_slice(&output.stdout).context("a client said nothing")?;
        let name = &self.name;
        tally.failures.iter_mut().for_each(|failure| *failure = format!("{name}: {failure}"));
        tally.by = tally.by.into_iter().map(|(target, pods)| (format!("{name}: {target}"), pods)).collect();
        Ok(tally)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_add_up() {
        let one = |answered, name: &str| Tally {
            kinds: [(Kind::New, Count { answered, failed: 1, ..Count::default() })].into(),
            failures: vec![name.into()],
            by: [("new/a".to_owned(), [name.to_owned()].into())].into(),
        };
        let long = Tally {
            kinds: [(Kind::Long, Count { reset: 2, ..Count::default() })].into(),
            ..Tally::default()
        };
        let all = one(2, "a").and(one(3, "b")).and(long);
        assert_eq!(all.of(&[Kind::New]), Count { answered: 5, failed: 2, ..Count::default() });
        assert_eq!(all.total(), Count { answered: 5, failed: 2, reset: 2, ..Count::default() });
        assert_eq!((all.failures.len(), all.by["new/a"].len()), (2, 2));
    }

    #[test]
    fn a_reset_differs_from_a_refusal() {
        let error = |kind: io::ErrorKind| Err::<(), _>(io::Error::from(kind)).context("listen").unwrap_err();
        assert!(is_reset(&error(io::ErrorKind::ConnectionReset)));
        assert!(!is_reset(&error(io::ErrorKind::ConnectionRefused)));
    }
}
