//! Answers with an exit code.

/// An answer, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// Text to print.
    pub text: String,
    /// Whether all is well; the exit code depends on it.
    pub well: bool,
}
