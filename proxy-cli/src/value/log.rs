//! The format and the level of the log.

use std::str::FromStr;

use serde::Serialize;

use super::error::ValueError;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text, for people.
    #[default]
    Text,
    /// JSON, for machines: one object on a line.
    Json,
}

/// The level of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum LogLevel {
    /// Only permanent failures.
    Error,
    /// Also what an operator should look at.
    Warn,
    /// Also what happens once: start, stop, settings, the first sync.
    #[default]
    Info,
    /// Also a line for each object.
    Debug,
    /// Also a line for each event.
    Trace,
}

impl LogLevel {
    /// All levels, the fewest lines first.
    pub const ALL: [Self; 5] = [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];
}

impl FromStr for LogLevel {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // kube-proxy's manifests contain klog numbers: `-v=2` is its usual "info".
        match text.to_ascii_lowercase().as_str() {
            "error" => Ok(Self::Error),
            "warn" | "warning" => Ok(Self::Warn),
            "info" | "0" | "1" | "2" | "3" => Ok(Self::Info),
            "debug" | "4" | "5" => Ok(Self::Debug),
            "trace" => Ok(Self::Trace),
            number if number.parse::<u32>().is_ok() => Ok(Self::Trace),
            _ => Err(ValueError::LogLevel),
        }
    }
}
