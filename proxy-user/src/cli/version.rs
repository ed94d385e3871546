//! `ballast version`.

use serde::Serialize;

use super::check::agent_version;
use super::show::{AgentState, ShowError, probe};
use proxy_cli::args::inspect::VersionArgs;
use proxy_cli::args::list::Output;
use proxy_cli::output::document;
use proxy_common::version::ABI_VERSION;

/// The versions of this program and of the agent.
#[derive(Debug, Serialize)]
struct Versions {
    version: &'static str,
    /// ABI version of the maps that this program reads.
    abi: u32,
    agent: AgentVersion,
}

#[derive(Debug, Serialize)]
struct AgentVersion {
    /// `null`: the agent does not answer.
    version: Option<String>,
    /// `null`: the agent was not asked.
    address: Option<String>,
}

/// Returns the versions in the requested format.
pub fn run(args: &VersionArgs) -> Result<String, ShowError> {
    let agent = probe(args.agent.metrics_bind_address);
    let address = match &agent {
        AgentState::NotAsked => None,
        AgentState::Answered { address, .. } | AgentState::Silent { address, .. } => {
            Some(address.to_string())
        }
    };
    let agent = AgentVersion { version: agent_version(&agent)?, address };
    render(&Versions { version: env!("CARGO_PKG_VERSION"), abi: ABI_VERSION, agent }, args.format.output)
}

fn render(versions: &Versions, output: Output) -> Result<String, ShowError> {
    let Versions { version, abi, agent } = versions;
    Ok(match output {
        Output::Name => format!("{version}\n"),
        Output::Text | Output::Wide | Output::Short => {
            let agent = match (&agent.version, &agent.address) {
                (Some(version), Some(address)) => format!("{version}, at {address}"),
                (_, Some(address)) => format!("no answer at {address}"),
                (_, None) => "not asked".to_owned(),
            };
            format!("ballast {version} (ABI {abi})\nagent   {agent}\n")
        }
        Output::Json | Output::Yaml | Output::Otlp => document(versions, output)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_shown() {
        let agent = AgentVersion { version: None, address: Some("127.0.0.1:10249".to_owned()) };
        let versions = Versions { version: "1.2.3", abi: 4, agent };
        let text = |output| render(&versions, output).unwrap();
        assert_eq!(text(Output::Text), "ballast 1.2.3 (ABI 4)\nagent   no answer at 127.0.0.1:10249\n");
        assert_eq!(text(Output::Name), "1.2.3\n");
        let json: serde_json::Value = serde_json::from_str(&text(Output::Json)).unwrap();
        assert_eq!(
            (&json["version"], &json["agent"]["version"]),
            (&"1.2.3".into(), &serde_json::Value::Null)
        );
    }
}
