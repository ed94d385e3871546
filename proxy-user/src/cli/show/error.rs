//! Errors of the commands that show state, and their output.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use crate::maps::view::ViewError;
use proxy_cli::output::ListError;
use proxy_cli::selector::SelectorError;
use proxy_core::model::nearest::{did_you_mean, nearest};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    /// The maps cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The arguments select no Service.
    #[error(transparent)]
    Selector(#[from] SelectorError),
    /// There is no such map.
    #[error("there is no map {asked}{near} (`ballast map list` shows all)")]
    NoMap {
        /// The requested map.
        asked: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
    },
    /// The API server did not return a pod, or the pod has no usable address.
    #[error("{0}")]
    Pod(String),
    /// The Service has several ports, or no address.
    #[error("{0}")]
    Destination(String),
    /// The agent has not programmed the Service.
    #[error("{0}")]
    NotProgrammed(String),
    /// There is no such check.
    #[error("there is no check {asked}{near} (`ballast check -o name` lists all)")]
    NoCheck {
        /// The requested check.
        asked: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
    },
    /// There is no such setting.
    #[error("there is no setting {asked}{near} (`ballast config --defaults` shows all)")]
    NoSetting {
        /// The requested setting.
        asked: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
    },
    /// The command needs the agent, which does not answer.
    #[error(
        "the agent does not answer ({0}): start `ballast run`, or give its address with --metrics-bind-address"
    )]
    NoAgent(String),
    /// The agent's answer cannot be read.
    #[error(transparent)]
    Asked(#[from] AskError),
    /// The arguments do not select anything to remove.
    #[error("nothing is selected: give {0}")]
    NothingSelected(&'static str),
    /// The stored values of the counters cannot be read or written.
    #[error("{}: {error}; choose another folder with --run-dir", path.display())]
    Zero {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        error: io::Error,
    },
    /// A client cannot reach an address of the other family.
    #[error(
        "the client {client} is {}, and {destination} is not: give a client of the same family",
        if client.is_ipv4() { "IPv4" } else { "IPv6" }
    )]
    Families {
        /// Address of the client.
        client: IpAddr,
        /// Address and port of the destination.
        destination: SocketAddr,
    },
    /// The list cannot be sorted or written.
    #[error(transparent)]
    List(#[from] ListError),
    /// The reader of standard output has gone.
    #[error("cannot write to standard output: {0}")]
    Write(io::Error),
}

/// An answer of the agent that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path} of the agent at {address}: {why}")]
pub struct AskError {
    /// The agent's address.
    pub address: SocketAddr,
    /// The requested path.
    pub path: String,
    /// Why the answer cannot be read.
    pub why: String,
}

impl ShowError {
    pub(super) fn no_map<'a>(asked: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        Self::NoMap { asked: asked.to_owned(), near: did_you_mean(&nearest(asked, known)) }
    }
}

impl From<serde_json::Error> for ShowError {
    fn from(error: serde_json::Error) -> Self {
        Self::List(error.into())
    }
}

impl From<io::Error> for ShowError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// An answer, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// Text to print.
    pub text: String,
    /// Whether all is well; the exit code depends on it.
    pub well: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_of_the_other_family_is_named_with_the_way_out() {
        let (client, destination) = ("10.0.0.7".parse().unwrap(), "[fd96::a]:80".parse().unwrap());
        let error = ShowError::Families { client, destination }.to_string();
        let expected =
            "the client 10.0.0.7 is IPv4, and [fd96::a]:80 is not: give a client of the same family";
        assert_eq!(error, expected);
    }
}
