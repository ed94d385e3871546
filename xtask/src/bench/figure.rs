//! One figure of the benchmark.

use serde::Deserialize;

/// One figure, as the benchmark writes it.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Figure {
    pub group: String,
    pub what: String,
    pub unit: String,
    pub value: f64,
    /// First and third quartile of the rounds; `None` if there are no rounds.
    #[serde(default)]
    pub quartiles: Option<[f64; 2]>,
    /// Maximum for the value; `None` if there is no target.
    pub target: Option<f64>,
}

impl Figure {
    /// Whether the value is above its target.
    pub fn is_missed(&self) -> bool {
        self.target.is_some_and(|target| self.value > target)
    }
}

/// Formats a value with its unit: three decimals for ratios, one for values below 100, else none.
pub fn number(value: f64, unit: &str) -> String {
    let digits = if unit == "x" { 3 } else { usize::from(value.abs() < 100.0) };
    format!("{value:.digits$} {unit}")
}
