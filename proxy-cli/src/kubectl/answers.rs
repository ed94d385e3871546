//! Answers of the nodes.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::de::DeserializeOwned;
use serde_json::Value;

/// The output of a command, on a node or of the plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome<T = String> {
    /// Standard output.
    pub stdout: T,
    /// Standard error.
    pub stderr: String,
    /// Whether the exit code was 0.
    pub is_well: bool,
}

impl Outcome {
    /// Returns an output without messages.
    pub(super) fn new(stdout: String, is_well: bool) -> Self {
        Self { stdout, stderr: String::new(), is_well }
    }

    /// Adds what a node reports to standard error.
    pub(super) fn note(&mut self, node: &str, text: &str) {
        for line in lines(&BTreeMap::from([(node, text)])) {
            self.stderr.extend([&*line, "\n"]);
        }
    }
}

/// Returns what nodes report, each line with its node in front.
pub(super) fn lines(messages: &BTreeMap<impl Display, impl AsRef<str>>) -> Vec<String> {
    let mut all = Vec::new();
    for (node, text) in messages {
        all.extend(text.as_ref().trim().lines().map(|line| format!("{node}: {line}")));
    }
    all
}

/// Answers of the nodes, or why a node did not answer, by the node's name.
pub(super) type PerNode<T> = BTreeMap<String, Result<T, String>>;

/// Parses the JSON of each node. If it cannot be parsed, the error is the node's standard error.
pub(super) fn decoded<T: DeserializeOwned>(answers: Vec<(String, Result<Outcome, String>)>) -> PerNode<T> {
    let decode = |answer: Outcome| {
        serde_json::from_str(&answer.stdout).map_err(|error| match answer.stderr.trim() {
            "" => unreadable(&error),
            message => message.to_owned(),
        })
    };
    answers.into_iter().map(|(node, answer)| (node, answer.and_then(decode))).collect()
}

/// Reads the used part of an answer.
pub(super) fn parsed<T: DeserializeOwned>(answer: Value) -> Result<T, String> {
    serde_json::from_value(answer).map_err(|error| unreadable(&error))
}

fn unreadable(error: &serde_json::Error) -> String {
    format!("cannot parse the answer: {error}")
}
