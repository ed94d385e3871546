//! Queries to the agent.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::error::{AskError, ShowError};
use crate::config::run::METRICS_PORT;
use crate::programs::XdpDevice;
use proxy_cli::exchange;
use proxy_cli::value::Listen;
use proxy_core::model::ApiServers;
use proxy_core::model::settings::PROXY_MODE;

/// How long the agent may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(1);
/// How long the agent may send nothing: with 50,000 Services, some answers take seconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of bytes that are read of an answer: another program may listen there, and send without end.
const MOST: u64 = 256 << 20;

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
        Err(error) => error.why,
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

/// What the agent reports at `/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AgentReport {
    /// Problems of objects, as sentences.
    pub problems: Vec<String>,
    /// XDP on the uplinks.
    pub xdp: Vec<XdpDevice>,
    /// Resident memory of the agent in bytes.
    pub resident: Option<u64>,
    /// The API servers.
    pub api_servers: ApiServers,
}

/// Returns the report of an agent that answers; it is empty if the agent is too old to know the path. An answer that cannot be
/// read is a problem.
pub fn report(agent: &AgentState) -> AgentReport {
    const PATH: &str = "/status";
    let AgentState::Answered { address, .. } = agent else { return AgentReport::default() };
    let report = ask(*address, PATH).and_then(|(status, body)| match status {
        404 => Ok(AgentReport::default()),
        _ => parse(*address, PATH, status, &body),
    });
    report.unwrap_or_else(|error| AgentReport { problems: vec![error.to_string()], ..AgentReport::default() })
}

/// Parses the answer to a path.
pub(in crate::cli) fn parse<T: DeserializeOwned>(
    address: SocketAddr,
    path: &str,
    status: u16,
    body: &[u8],
) -> Result<T, AskError> {
    let why = match serde_json::from_slice(body) {
        _ if status != 200 => format!("it answers with HTTP {status}"),
        Ok(parsed) => return Ok(parsed),
        Err(error) => format!("cannot parse the answer: {error}"),
    };
    Err(AskError { address, path: path.to_owned(), why })
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
pub(in crate::cli) fn ask(address: SocketAddr, path: &str) -> Result<(u16, Vec<u8>), AskError> {
    ask_within(address, path, PATIENCE, MOST).map_err(|why| AskError { address, path: path.to_owned(), why })
}

fn ask_within(
    address: SocketAddr,
    path: &str,
    patience: Duration,
    most: u64,
) -> Result<(u16, Vec<u8>), String> {
    let reason = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => format!("no complete answer within {patience:?}"),
        _ => error.to_string(),
    };
    let answer = send(address, path, patience, most).map_err(reason)?;
    if answer.len() as u64 > most {
        return Err(format!("the answer is longer than {most} bytes"));
    }
    exchange::answer(answer).map_err(str::to_owned)
}

/// Sends a GET request. Returns the whole answer, or its first bytes: one more than `most`.
fn send(address: SocketAddr, path: &str, patience: Duration, most: u64) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECT)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    // The request is sent in one piece, because a server that is not Ballast's may close the connection after the first piece.
    stream.write_all(exchange::request(address, path).as_bytes())?;
    let mut answer = Vec::new();
    stream.take(most + 1).read_to_end(&mut answer)?;
    Ok(answer)
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

    use proxy_core::testing::free_port;

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
    fn answer_that_is_late_or_too_long_or_no_json_is_an_error() {
        const OK: &[u8] = b"HTTP/1.1 200 OK\r\n\r\n";
        let asked = |body: &'static [u8], patience: u64, most: u64| {
            let agent = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = agent.local_addr().unwrap();
            let served = std::thread::spawn(move || {
                let (mut stream, _) = agent.accept().unwrap();
                let _ = stream.read(&mut [0; 512]).unwrap();
                let _ = stream.write_all(&[OK, body].concat());
                // An empty body is one that never ends.
                if body.is_empty() { stream.read(&mut [0; 512]).unwrap_or_default() } else { 0 }
            });
            let answer = ask_within(address, "/x", Duration::from_millis(patience), most);
            served.join().unwrap();
            answer.map(|(_, body)| body)
        };
        assert_eq!(asked(b"", 20, 100), Err("no complete answer within 20ms".to_owned()));
        assert_eq!(asked(b"abc", 10_000, 21), Err("the answer is longer than 21 bytes".to_owned()));
        assert_eq!(asked(b"abc", 10_000, 22), Ok(b"abc".to_vec()));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let error = parse::<Vec<u8>>(address, "/x", 200, b"[1,").unwrap_err().to_string();
        assert!(error.starts_with("cannot read /x of the agent at 127.0.0.1:1: cannot parse"), "{error}");
        let error = parse::<Vec<u8>>(address, "/x", 500, b"[]").unwrap_err().to_string();
        assert!(error.ends_with("it answers with HTTP 500"), "{error}");
    }

    #[test]
    fn agent_on_the_second_address_is_found() {
        let silent: SocketAddr = ([127, 0, 0, 1], free_port()).into();
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
