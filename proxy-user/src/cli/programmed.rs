//! `ballast programmed`: what the agent has programmed, as the agent reports it.

use super::args::programmed::ProgrammedArgs;
use super::show::{ask, reachable};
use crate::config::run::METRICS_PORT;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProgrammedError {
    /// The agent's metrics server, which would answer, is switched off.
    #[error("the agent's metrics server is switched off: set --metrics-bind-address")]
    NotAsked,
    /// The agent does not answer.
    #[error(
        "the agent does not answer at {address}: {source}; only the agent knows the programmed versions (`ballast service list` reads the maps without the agent)"
    )]
    Silent {
        /// The queried address.
        address: std::net::SocketAddr,
        /// Why there is no answer.
        source: std::io::Error,
    },
    /// The agent has no such Service, or does not know it yet.
    #[error("{0}")]
    Refused(String),
    /// The text is not the name of a Service.
    #[error("{0:?} is not the name of a Service: give NAMESPACE/NAME, like default/redis")]
    Name(String),
}

/// Returns the JSON answer of `/programmed`.
pub fn run(args: &ProgrammedArgs) -> Result<String, ProgrammedError> {
    let listen = args.agent.metrics_bind_address;
    let address = listen.resolve(METRICS_PORT).map(reachable).ok_or(ProgrammedError::NotAsked)?;
    let path = match &args.service {
        None => "/programmed".to_owned(),
        Some(service) => path(service)?,
    };
    let silent = |source| ProgrammedError::Silent { address, source };
    let (status, body) = ask(address, &path).map_err(silent)?;
    let mut body = String::from_utf8_lossy(&body).into_owned();
    if status != 200 {
        let told: Option<String> = serde_json::from_str::<serde_json::Value>(&body)
            .ok()
            .and_then(|body| body.get("error")?.as_str().map(str::to_owned));
        let unknown = || format!("the agent answers {status} to {path}: it may be older than this program");
        return Err(ProgrammedError::Refused(told.unwrap_or_else(unknown)));
    }
    body.push('\n');
    Ok(body)
}

fn path(service: &str) -> Result<String, ProgrammedError> {
    let (namespace, name) = service.split_once('/').unwrap_or(("default", service));
    let is_part =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c));
    if is_part(namespace) && is_part(name) {
        Ok(format!("/programmed/{namespace}/{name}"))
    } else {
        Err(ProgrammedError::Name(service.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_becomes_a_path_and_nothing_else_does() {
        assert_eq!(path("kube-system/kube-dns").unwrap(), "/programmed/kube-system/kube-dns");
        assert_eq!(path("web").unwrap(), "/programmed/default/web");
        for text in ["", "/", "a/b/c", "a/b c", "a/b:80", "a/../b"] {
            assert!(path(text).is_err(), "{text}");
        }
    }
}
