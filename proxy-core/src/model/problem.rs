//! Problems of objects.

use std::fmt;

/// The most problems of an object that are listed.
pub const MOST_PROBLEMS: usize = 16;

/// A part of an object that could not be used; the rest of it still counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object: `Service default/redis`, `EndpointSlice default/redis-x7k2p`.
    pub object: String,
    /// The field, as `kubectl explain` names it.
    pub field: String,
    /// What is wrong with the field, and how to correct it.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.object, self.field, self.message)
    }
}

/// Returns a text of others, which is printed to terminals, with its control characters escaped.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() { printable.extend(char.escape_default()) } else { printable.push(char) }
    }
    printable
}

/// Returns the text of an error with its causes, each of them once: the outer error alone may only say `client error (Connect)`.
/// The client library's names of errors, and its debug form of a `Status`, tell users nothing, and are left out.
pub fn chain(error: &dyn std::error::Error) -> String {
    let text_of = |error: &dyn std::error::Error| {
        let text = error.to_string().replace("ServiceError: ", "").replace("ApiError: ", "");
        text.split(" (Status { ").next().unwrap_or_default().to_owned()
    };
    let mut text = text_of(error);
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = text_of(error);
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}
