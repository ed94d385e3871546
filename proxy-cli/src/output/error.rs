//! Errors of lists.

/// Why a list cannot be sorted or written.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
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
    /// The output cannot be written as JSON.
    #[error("cannot write the output as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The output cannot be written as YAML.
    #[error("cannot write the output as YAML: {0}")]
    Yaml(#[from] serde_saphyr::ser::Error),
}
