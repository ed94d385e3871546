//! The algorithm for Services that do not select one.

use std::fmt;
use std::str::FromStr;

use proxy_common::select::Algorithm;
use serde::{Serialize, Serializer};

use super::error::ValueError;
use proxy_core::model::spread;

/// An algorithm by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmName(pub Algorithm);

impl FromStr for AlgorithmName {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        spread::algorithm(text).map(Self).ok_or_else(|| ValueError::Algorithm(spread::algorithm_names()))
    }
}

impl fmt::Display for AlgorithmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.label())
    }
}

impl Serialize for AlgorithmName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.label())
    }
}
