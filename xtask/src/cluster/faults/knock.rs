//! A client that makes one connection after the other, and counts those that get no answer.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::exec::Cmd;

/// Between two connections.
const PAUSE: Duration = Duration::from_millis(5);
/// A connection that takes longer counts as none.
const LIMIT: Duration = Duration::from_secs(2);
/// After this, an answer on a connection counts as none: servers wait for a processor on a small machine.
const ANSWER: Duration = Duration::from_secs(20);

/// So many failures are told in full.
const TOLD: usize = 20;

/// Whom to ask, and how the names of those who may answer begin: `10.96.0.80:80=echo-`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    address: SocketAddr,
    name: String,
}

impl Target {
    /// One at an address.
    pub(super) fn new(address: &str, name: &str) -> Result<Self> {
        let address = address.parse().with_context(|| format!("`{address}` is no address with a port"))?;
        Ok(Self { address, name: name.to_owned() })
    }
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (address, name) = text.split_once('=').context("a target is ADDRESS:PORT=NAME")?;
        Self::new(address, name)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.address, self.name)
    }
}

/// What a client saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Connections that brought an answer.
    pub answered: u64,
    /// Connections that did not.
    pub failed: u64,
    /// When, from where and why the first of them failed.
    pub failures: Vec<String>,
}

impl Tally {
    /// Both together.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.answered += other.answered;
        self.failed += other.failed;
        self.failures.extend(other.failures);
        self
    }
}

/// Asks HTTP servers for `/hostname`, one after the other, on a new connection each time, until standard input ends;
/// then prints what was.
pub fn knock(targets: &[Target]) -> Result<()> {
    static ENDED: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ENDED.store(true, Ordering::Relaxed);
    });
    let mut tally = Tally::default();
    for target in targets.iter().cycle() {
        if ENDED.load(Ordering::Relaxed) {
            break;
        }
        let start = Instant::now();
        match once(target) {
            Ok(()) => tally.answered += 1,
            Err(error) => {
                tally.failed += 1;
                if tally.failures.len() < TOLD {
                    let (now, took) = (jiff::Timestamp::now(), start.elapsed().as_secs_f64());
                    tally.failures.push(format!("{now:.3} {target} after {took:.3} s: {error:#}"));
                }
            }
        }
        sleep(PAUSE);
    }
    let text = serde_json::to_string(&tally).context("cannot write the tally")?;
    writeln!(std::io::stdout(), "{text}").context("nobody listens")
}

/// One connection with one question.
fn once(target: &Target) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&target.address, LIMIT).context("connect")?;
    // Which flow it was is what a trace is searched for.
    let from = stream.local_addr().context("who are we")?;
    ask(&mut stream, target).with_context(|| format!("from {from}"))
}

fn ask(stream: &mut TcpStream, target: &Target) -> Result<()> {
    stream.set_read_timeout(Some(ANSWER)).context("set a limit")?;
    stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n").context("ask")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("listen")?;
    anyhow::ensure!(answer.starts_with("HTTP/1") && answer.contains(" 200 "), "an answer of `{answer}`");
    let name = answer.rsplit("\r\n").next().unwrap_or_default();
    anyhow::ensure!(name.starts_with(&target.name), "`{name}` answered");
    Ok(())
}

/// A client at work.
#[derive(Debug)]
pub(super) struct Knocker {
    child: Child,
}

impl Knocker {
    /// Starts one; `place` is a command that runs what follows somewhere.
    pub(super) fn start(place: Cmd, targets: &[Target]) -> Result<Self> {
        let us = std::env::current_exe().context("cannot find our own program")?;
        let mut command: Command =
            place.arg(us).args(["cluster", "knock"]).args(targets.iter().map(Target::to_string)).into_std();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Ok(Self { child: command.spawn().context("cannot start a client")? })
    }

    /// Ends it, and returns what it saw.
    pub(super) fn stop(mut self) -> Result<Tally> {
        drop(self.child.stdin.take());
        let output = self.child.wait_with_output().context("cannot wait for a client")?;
        serde_json::from_slice(&output.stdout).context("a client said nothing")
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn an_answer_of_the_right_one_counts_and_nothing_else_does() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Target::new(&server.local_addr().unwrap().to_string(), "pod-").unwrap();
        let answers = std::thread::spawn(move || {
            for answer in ["200 OK\r\n\r\npod-1", "200 OK\r\n\r\nother-1", "503 No\r\n\r\npod-1"] {
                let (mut stream, _) = server.accept().unwrap();
                let _ = stream.read(&mut [0; 64]).unwrap();
                stream.write_all(format!("HTTP/1.0 {answer}").as_bytes()).unwrap();
            }
        });
        once(&target).unwrap();
        assert!(format!("{:#}", once(&target).unwrap_err()).contains("`other-1` answered"));
        assert!(once(&target).is_err());
        answers.join().unwrap();
        assert!(once(&target).is_err());
    }

    #[test]
    fn a_target_reads_as_it_is_written() {
        let target: Target = "10.96.0.80:80=echo-".parse().unwrap();
        assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
        assert!("10.96.0.80=echo-".parse::<Target>().is_err() && "10.96.0.80:80".parse::<Target>().is_err());
    }

    #[test]
    fn failures_are_kept() {
        let one = Tally { answered: 2, failed: 1, failures: vec!["a".into()] };
        let two = Tally { answered: 3, failed: 2, failures: vec!["b".into()] };
        assert_eq!(one.and(two), Tally { answered: 5, failed: 3, failures: vec!["a".into(), "b".into()] });
    }
}
