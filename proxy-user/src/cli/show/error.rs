//! Errors of the reading commands.

use std::io;
use std::path::PathBuf;

use crate::maps::view::ViewError;
use crate::model::nearest::{did_you_mean, nearest};

/// Why a text is not the name of a Service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// The text has another form.
    #[error(
        "{0:?} is not the name of a Service: give NAMESPACE/NAME or NAMESPACE/NAME:PORT, like default/redis:6379"
    )]
    Form(String),
    /// The name and the flag `--namespace` give different namespaces.
    #[error(
        "{text:?} is not in the namespace {namespace}: remove --namespace, or give the name without namespace"
    )]
    Namespace {
        /// The text.
        text: String,
        /// Value of `--namespace`.
        namespace: String,
    },
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    /// The maps cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The name of a Service is invalid.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// No such Service is programmed.
    #[error(
        "no Service port {filter} is programmed{near} (`ballast service list` shows all; headless Services, and Services without a TCP, UDP or SCTP port, are not programmed{left_alone})"
    )]
    NoService {
        /// The requested Service.
        filter: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
        /// Unmanaged cluster addresses, with a leading `; `; or empty.
        left_alone: String,
    },
    /// There is no such map.
    #[error("there is no map {asked}{near} (`ballast map list` shows all)")]
    NoMap {
        /// The requested map.
        asked: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
    },
    /// The list has no such field or column to sort by.
    #[error("the list has no field or column {asked:?}{near} (--sort-by takes {known})")]
    NoField {
        /// The requested field.
        asked: String,
        /// Similar names, with a leading `; `; or empty.
        near: String,
        /// All fields, and the columns besides them.
        known: String,
    },
    /// The API server did not return the Services with the labels.
    #[error("cannot read labels from the API server: {0}")]
    Labels(String),
    /// There is no such setting.
    #[error("there is no setting {asked}{near} (`ballast config --all` shows all)")]
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
    #[error("client and destination have different address families")]
    Families,
    /// The output cannot be written as JSON.
    #[error("cannot write the output as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The output cannot be written as YAML.
    #[error("cannot write the output as YAML: {0}")]
    Yaml(#[from] serde_saphyr::ser::Error),
    /// The reader of standard output has gone.
    #[error("cannot write to standard output: {0}")]
    Write(io::Error),
}

impl ShowError {
    pub(super) fn no_map<'a>(asked: &str, known: impl IntoIterator<Item = &'a str>) -> Self {
        Self::NoMap { asked: asked.to_owned(), near: did_you_mean(&nearest(asked, known)) }
    }
}

impl From<io::Error> for ShowError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}
