//! The output of `ballast programmed -o json`, which the plugin reads.

use serde::{Deserialize, Serialize};

/// The programmed version of a Service.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProgrammedJson {
    /// Name of its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `null` for objects from a folder.
    pub uid: Option<String>,
    /// `null` for objects from a folder.
    pub resource_version: Option<String>,
    /// `null` for objects from a folder.
    pub generation: Option<i64>,
    /// Its EndpointSlices.
    pub endpoint_slices: Vec<SliceJson>,
    /// In RFC 3339 format.
    pub programmed_since: String,
    /// There is no newer version that could not be programmed.
    pub current: bool,
    /// Number of addresses and ports to which clients can connect; `null` if the agent is older.
    pub frontends: Option<usize>,
    /// Problems of the Service and of its EndpointSlices.
    pub problems: Vec<String>,
}

/// The programmed version of an EndpointSlice.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SliceJson {
    /// Its name.
    pub name: String,
    /// `null` for objects from a folder.
    pub uid: Option<String>,
    /// `null` for objects from a folder.
    pub resource_version: Option<String>,
    /// `null` for objects from a folder.
    pub generation: Option<i64>,
}
