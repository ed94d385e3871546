//! A client that makes one connection after the other, and counts those that get no answer.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::exec::Cmd;

/// Between two connections.
const PAUSE: Duration = Duration::from_millis(5);
/// After this, an answer counts as none.
const LIMIT: Duration = Duration::from_secs(2);

/// What a client saw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Connections that brought an answer.
    pub answered: u64,
    /// Connections that did not.
    pub failed: u64,
    /// Why the first of them failed.
    pub first: Option<String>,
}

impl Tally {
    /// Both together; the first failure is ours if we had one.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            answered: self.answered + other.answered,
            failed: self.failed + other.failed,
            first: self.first.or(other.first),
        }
    }
}

/// Asks an HTTP server for `/hostname`, on a new connection each time, until standard input ends; then prints what was.
pub fn knock(address: SocketAddr) -> Result<()> {
    static ENDED: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ENDED.store(true, Ordering::Relaxed);
    });
    let mut tally = Tally::default();
    let start = Instant::now();
    while !ENDED.load(Ordering::Relaxed) {
        match once(address) {
            Ok(()) => tally.answered += 1,
            Err(error) => {
                tally.failed += 1;
                let after = start.elapsed().as_secs_f64();
                tally.first.get_or_insert_with(|| format!("{address} after {after:.1} s: {error:#}"));
            }
        }
        sleep(PAUSE);
    }
    let text = serde_json::to_string(&tally).context("cannot write the tally")?;
    writeln!(std::io::stdout(), "{text}").context("nobody listens")
}

/// One connection with one question.
pub(super) fn once(address: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, LIMIT).context("connect")?;
    stream.set_read_timeout(Some(LIMIT)).context("set a limit")?;
    stream.write_all(b"GET /hostname HTTP/1.0\r\n\r\n").context("ask")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("listen")?;
    anyhow::ensure!(answer.starts_with("HTTP/1") && answer.contains(" 200 "), "an answer of `{answer}`");
    Ok(())
}

/// A client at work.
#[derive(Debug)]
pub(super) struct Knocker {
    child: Child,
}

impl Knocker {
    /// Starts one; `place` is a command that runs what follows somewhere.
    pub(super) fn start(place: Cmd, address: &str) -> Result<Self> {
        let us = std::env::current_exe().context("cannot find our own program")?;
        let mut command: Command = place.arg(us).args(["cluster", "knock", address]).into_std();
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
    fn an_answer_counts_and_a_refusal_does_not() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let answers = std::thread::spawn(move || {
            for answer in ["HTTP/1.0 200 OK\r\n\r\npod", "HTTP/1.0 503 No\r\n\r\n"] {
                let (mut stream, _) = server.accept().unwrap();
                let _ = stream.read(&mut [0; 64]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        once(address).unwrap();
        assert!(once(address).is_err());
        answers.join().unwrap();
        assert!(once(address).is_err());
    }

    #[test]
    fn the_first_failure_is_kept() {
        let one = Tally { answered: 2, failed: 1, first: Some("a".into()) };
        let two = Tally { answered: 3, failed: 2, first: Some("b".into()) };
        assert_eq!(one.and(two), Tally { answered: 5, failed: 3, first: Some("a".into()) });
    }
}
