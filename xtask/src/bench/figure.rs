//! One figure of the benchmark.

use serde::Deserialize;

/// One figure, as the benchmark writes it.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Figure {
    pub group: String,
    pub what: String,
    pub unit: String,
    pub value: f64,
    /// Between these lies the middle half of the rounds, where there are rounds.
    #[serde(default)]
    pub quartiles: Option<[f64; 2]>,
    /// At most this much; `None` where there is no target.
    pub target: Option<f64>,
}

impl Figure {
    /// Whether it is above its target.
    pub fn is_missed(&self) -> bool {
        self.target.is_some_and(|target| self.value > target)
    }
}

/// A value with its unit: three digits behind the point for ratios, one for small numbers.
pub fn number(value: f64, unit: &str) -> String {
    let digits = if unit == "x" { 3 } else { usize::from(value.abs() < 100.0) };
    format!("{value:.digits$} {unit}")
}
