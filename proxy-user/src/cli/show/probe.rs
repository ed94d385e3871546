//! Queries to the agent.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use super::error::ShowError;
use crate::config::run::METRICS_PORT;
use crate::config::value::Listen;
use crate::programs::XdpDevice;
use proxy_core::model::ApiServers;
use proxy_core::model::settings::PROXY_MODE;

/// How long the agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum number of bytes that are read of an answer: another program may listen there, and send without end.
const MOST: u64 = 16 << 20;

/// Result of a query to the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentState {
    /// The agent's metrics server is switched off, so the agent was not queried.
    NotAsked,
    /// The agent answered with this HTTP status.
    Answered {
        /// The queried address.
        address: SocketAddr,
        /// 200 if the agent is healthy, 503 if it is not.
        status: u16,
    },
    /// The agent did not answer.
    Silent {
        /// The queried address.
        address: SocketAddr,
        /// Why there is no answer.
        reason: String,
    },
}

/// Queries `/healthz` of the agent's metrics server. Without an address: at the defaults of both families, since the default
/// has the family of the agent's `--bind-address`.
pub fn probe(listen: Option<Listen>) -> AgentState {
    let loopback = |ip: IpAddr| SocketAddr::new(ip, METRICS_PORT);
    match listen.map(|listen| listen.resolve(METRICS_PORT)) {
        None => probe_either(loopback(Ipv4Addr::LOCALHOST.into()), loopback(Ipv6Addr::LOCALHOST.into())),
        Some(None) => AgentState::NotAsked,
        Some(Some(address)) => probe_at(reachable(address)),
    }
}

/// Queries the second address if the first does not answer; if none answers, returns the state of the first.
fn probe_either(first: SocketAddr, second: SocketAddr) -> AgentState {
    let state = probe_at(first);
    if !matches!(state, AgentState::Silent { .. }) {
        return state;
    }
    match probe_at(second) {
        AgentState::Silent { .. } => state,
        answered => answered,
    }
}

fn probe_at(address: SocketAddr) -> AgentState {
    let reason = match ask(address, "/healthz") {
        Ok((status, _)) => match other_mode(address) {
            None => return AgentState::Answered { address, status },
            Some(mode) => format!(
                "kube-proxy in mode {mode} answers there: when it is stopped, the agent takes over the port within 5 s"
            ),
        },
        Err(error) => error.to_string(),
    };
    AgentState::Silent { address, reason }
}

/// Returns the mode of the proxy that listens at this address, if it is another one: kube-proxy has the same default address.
fn other_mode(address: SocketAddr) -> Option<String> {
    let (_, body) = ask(address, "/proxyMode").ok().filter(|(status, _)| *status == 200)?;
    let mode = String::from_utf8(body).ok()?.trim().to_owned();
    let is_mode = (1..=16).contains(&mode.len()) && mode.bytes().all(|byte| byte.is_ascii_lowercase());
    (is_mode && mode != PROXY_MODE).then_some(mode)
}

/// Returns the problems that the agent reports; empty if it does not answer, or is too old to report them.
pub fn problems(agent: &AgentState) -> Vec<String> {
    let AgentState::Answered { address, .. } = agent else { return Vec::new() };
    match ask(*address, "/problems") {
        Ok((200, body)) => serde_json::from_slice(&body).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Returns what the agent reports about XDP on the uplinks; empty if it does not answer.
pub fn xdp(agent: &AgentState) -> Vec<XdpDevice> {
    let AgentState::Answered { address, .. } = agent else { return Vec::new() };
    match ask(*address, "/xdp") {
        Ok((200, body)) => serde_json::from_slice(&body).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Returns the resident memory of the agent in bytes; `None` if it does not answer.
pub fn resident(agent: &AgentState) -> Option<u64> {
    let AgentState::Answered { address, .. } = agent else { return None };
    match ask(*address, "/memory") {
        Ok((200, body)) => serde_json::from_slice(&body).unwrap_or_default(),
        _ => None,
    }
}

/// Returns what the agent reports about the API servers; empty if it does not answer.
pub fn api_servers(agent: &AgentState) -> ApiServers {
    let AgentState::Answered { address, .. } = agent else { return ApiServers::default() };
    match ask(*address, "/apiservers") {
        Ok((200, body)) => serde_json::from_slice(&body).unwrap_or_default(),
        _ => ApiServers::default(),
    }
}

/// Returns the loopback address for a server that listens on all addresses.
pub(in crate::cli) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Sends a GET request to an HTTP server. Returns status and body of the answer.
pub(in crate::cli) fn ask(address: SocketAddr, path: &str) -> io::Result<(u16, Vec<u8>)> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // The request is sent in one piece, because a server that is not Ballast's may close the connection after the first piece.
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(MOST).read_to_end(&mut answer)?;
    // Only the status of the head is needed: `HTTP/1.1 200`.
    let status = answer.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5));
    let status = status.and_then(|text| str::from_utf8(text).ok()).and_then(|text| text.parse().ok());
    let status =
        status.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP"))?;
    let body = answer.windows(4).position(|end| end == b"\r\n\r\n").map_or(answer.len(), |end| end + 4);
    Ok((status, answer.split_off(body)))
}

/// Returns the address of the agent if it answers, or the error that it does not.
pub(in crate::cli) fn agent_address(listen: Option<Listen>) -> Result<SocketAddr, ShowError> {
    match probe(listen) {
        AgentState::Answered { address, .. } => Ok(address),
        AgentState::NotAsked => Err(ShowError::NoAgent("its metrics server is switched off".to_owned())),
        AgentState::Silent { address, reason } => Err(ShowError::NoAgent(format!("{address}: {reason}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn kube_proxy_at_the_address_of_the_agent_is_named() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let served = std::thread::spawn(move || {
            for body in ["ok", "nftables"] {
                let (mut stream, _) = other.accept().unwrap();
                let _ = stream.read(&mut [0; 512]).unwrap();
                stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{body}").as_bytes()).unwrap();
            }
        });
        let state = probe_at(address);
        served.join().unwrap();
        assert!(
            matches!(&state, AgentState::Silent { reason, .. } if reason.contains("kube-proxy in mode nftables")),
            "{state:?}"
        );
    }

    #[test]
    fn agent_on_the_second_address_is_found() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let agent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = agent.local_addr().unwrap();
        let served = std::thread::spawn(move || {
            let (mut stream, _) = agent.accept().unwrap();
            let _ = stream.read(&mut [0; 512]).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nok").unwrap();
        });
        assert_eq!(probe_either(silent, address), AgentState::Answered { address, status: 200 });
        served.join().unwrap();
        let state = probe_either(silent, address);
        assert!(matches!(state, AgentState::Silent { address, .. } if address == silent), "{state:?}");
    }
}
