//! Whether the agent answers.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use crate::cli::config::METRICS_PORT;
use crate::cli::value::Listen;

/// How long the agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// What was heard of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentState {
    /// Its server is switched off, so it was not asked.
    NotAsked,
    /// It answered with this HTTP status.
    Answered {
        /// Where it was asked.
        address: SocketAddr,
        /// 200 when it is well, 503 when it is not.
        status: u16,
    },
    /// It did not answer.
    Silent {
        /// Where it was asked.
        address: SocketAddr,
        /// Why there is no answer.
        reason: String,
    },
}

/// Asks the agent's metrics server for `/healthz`.
pub fn probe(listen: Listen) -> AgentState {
    let Some(address) = listen.resolve(METRICS_PORT).map(reachable) else { return AgentState::NotAsked };
    match ask(address) {
        Ok(status) => AgentState::Answered { address, status },
        Err(error) => AgentState::Silent { address, reason: error.to_string() },
    }
}

/// A server that listens on all addresses is asked on the loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn ask(address: SocketAddr) -> io::Result<u16> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // In one piece: a server that is none of ours may close after it saw the first.
    let request = format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    // `HTTP/1.1 200` is all that counts.
    let mut line = [0; 12];
    stream.read_exact(&mut line)?;
    let status =
        line.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..)).and_then(|s| str::from_utf8(s).ok());
    status
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "something else than HTTP answered"))
}
