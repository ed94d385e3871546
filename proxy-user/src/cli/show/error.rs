//! Why there is no answer.

use std::io;
use std::path::PathBuf;

use crate::maps::view::ViewError;
use crate::model::nearest::{did_you_mean, nearest};

/// The text names no Service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// It has another form.
    #[error(
        "{0:?} is not the name of a Service: give NAMESPACE/NAME or NAMESPACE/NAME:PORT, like default/redis:6379"
    )]
    Form(String),
    /// Two namespaces.
    #[error(
        "{text:?} is not in the namespace {namespace}: remove --namespace, or give the name without namespace"
    )]
    Namespace {
        /// The name.
        text: String,
        /// What `--namespace` says.
        namespace: String,
    },
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    /// The maps cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The Service was not named properly.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// No such Service is programmed.
    #[error(
        "no Service port {filter} is programmed{near} (`ballast service list` shows all; headless Services, and Services without a TCP, UDP or SCTP port, are not programmed{left_alone})"
    )]
    NoService {
        /// What was asked for.
        filter: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
        /// Cluster addresses that are left alone, with a leading `; `, or nothing.
        left_alone: String,
    },
    /// There is no such map.
    #[error("there is no map {asked}{near} (`ballast map list` shows all)")]
    NoMap {
        /// What was asked for.
        asked: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
    },
    /// The list cannot be sorted by that.
    #[error("the list has no field or column {asked:?}{near} (--sort-by takes {known})")]
    NoField {
        /// What was asked for.
        asked: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
        /// All fields, and the columns beside them.
        known: String,
    },
    /// The API server did not say which Services have the labels.
    #[error("cannot read labels from the API server: {0}")]
    Labels(String),
    /// There is no such setting.
    #[error("there is no setting {asked}{near} (`ballast config --all` shows all)")]
    NoSetting {
        /// What was asked for.
        asked: String,
        /// What may have been meant, with a leading `; `, or nothing.
        near: String,
    },
    /// The agent has to answer, and does not.
    #[error(
        "the agent does not answer ({0}): start `ballast run`, or give its address with --metrics-bind-address"
    )]
    NoAgent(String),
    /// Nothing says what is to be removed.
    #[error("nothing is selected: give {0}")]
    Unsaid(&'static str),
    /// What the counters were cannot be read or noted.
    #[error("{}: {error}; choose another folder with --run-dir", path.display())]
    Zero {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A client cannot reach an address of the other family.
    #[error("client and destination have different address families")]
    Families,
    /// The answer cannot be written as JSON.
    #[error("cannot write the output as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The answer cannot be written as YAML.
    #[error("cannot write the output as YAML: {0}")]
    Yaml(#[from] serde_saphyr::ser::Error),
    /// The reader of the answer has gone.
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
