//! Clients of the demo, run as processes in its namespaces: repeated redis requests, and one HTTP request. They are
//! separate processes because the cgroup of a process decides whether socket hooks see it.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};

/// Prefix of an answer on the connection that stays open.
pub(super) const HELD: &str = "held ";
/// Prefix of the reason of a failure.
pub(super) const FAILED: &str = "failed ";
/// Timeout of a connect, read or write.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pause between two requests, to leave CPU time to the machine.
const PAUSE: Duration = Duration::from_millis(2);
/// `GET whoami` in the redis protocol.
const REQUEST: &[u8] = b"*2\r\n$3\r\nGET\r\n$6\r\nwhoami\r\n";

/// Sends `count` requests, each on its own connection, and prints a line for each. If `count` is 0, it never ends, and also
/// sends requests on one connection that stays open.
pub(super) fn ask(address: SocketAddr, count: u32) -> Result<()> {
    let mut held = None;
    let mut sent = 0;
    while count == 0 || sent < count {
        sent += 1;
        tell("", connect(address).and_then(|mut redis| whoami(&mut redis)))?;
        if count == 0 {
            let answer = match &mut held {
                Some(redis) => whoami(redis),
                None => connect(address).and_then(|redis| whoami(held.insert(redis))),
            };
            if answer.is_err() {
                held = None;
            }
            tell(HELD, answer)?;
            sleep(PAUSE);
        }
    }
    Ok(())
}

fn tell(mark: &str, answer: io::Result<String>) -> Result<()> {
    let mut out = io::stdout().lock();
    match answer {
        Ok(name) => writeln!(out, "{mark}{name}"),
        Err(error) => writeln!(out, "{FAILED}{mark}{error}"),
    }
    .and_then(|()| out.flush())
    .context("the reader of the answers is gone")
}

fn connect(address: SocketAddr) -> io::Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(BufReader::new(stream))
}

fn whoami(redis: &mut BufReader<TcpStream>) -> io::Result<String> {
    redis.get_mut().write_all(REQUEST)?;
    let mut length = String::new();
    redis.read_line(&mut length)?;
    // `$7` precedes a line of seven bytes; `$-1`: this redis was not told its name.
    let is_text = length.strip_prefix('$').is_some_and(|n| n.trim().parse::<u32>().is_ok());
    if !is_text {
        return Err(io::Error::other(format!("redis answered {:?}", length.trim())));
    }
    let mut name = String::new();
    redis.read_line(&mut name)?;
    Ok(name.trim().to_owned())
}

/// Prints the body of `http://ADDRESS/PATH`.
pub(super) fn fetch(url: &str) -> Result<()> {
    let (address, path) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .ok_or_else(|| anyhow!("{url} is not http://ADDRESS/PATH"))?;
    let mut stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(PATIENCE)).context("cannot set a time limit")?;
    let request = format!("GET /{path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
    let mut answer = String::new();
    stream
        .write_all(request.as_bytes())
        .and_then(|()| stream.read_to_string(&mut answer))
        .with_context(|| format!("no answer from {url}"))?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or_else(|| anyhow!("{url} answered no HTTP"))?;
    io::stdout().write_all(body.as_bytes()).context("the reader of the answer is gone")
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Starts a server that answers one request, and returns its address.
    fn answering(answer: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; REQUEST.len()];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(answer).unwrap();
        });
        address
    }

    fn asked(answer: &'static [u8]) -> io::Result<String> {
        whoami(&mut connect(answering(answer)).unwrap())
    }

    #[test]
    fn a_name_is_an_answer_and_nothing_else_is() {
        assert_eq!(asked(b"$7\r\nredis-1\r\n").unwrap(), "redis-1");
        assert!(asked(b"$-1\r\n").unwrap_err().to_string().contains("$-1"));
        assert!(asked(b"-ERR no\r\n").is_err());
        assert!(asked(b"").is_err());
    }
}
