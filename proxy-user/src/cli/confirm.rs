//! Asks before something is removed, if standard input is a terminal.

use std::io::{self, BufRead, IsTerminal as _, Write};

/// Whether to ask: only if standard input and standard error are terminals. Scripts, units and containers are not asked.
pub fn is_asked() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks a yes-or-no question; any answer but yes counts as no.
pub fn confirmed(question: &str, input: &mut impl BufRead, out: &mut impl Write) -> io::Result<bool> {
    write!(out, "{question} [y/N] ")?;
    out.flush()?;
    let mut answer = String::new();
    input.read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("y\n", true)]
    #[case("Yes\n", true)]
    #[case("\n", false)]
    #[case("no\n", false)]
    #[case("", false)]
    fn only_yes_is_yes(#[case] answer: &str, #[case] expected: bool) {
        let mut out = Vec::new();
        assert_eq!(confirmed("Remove it?", &mut answer.as_bytes(), &mut out).unwrap(), expected);
        assert_eq!(out, b"Remove it? [y/N] ");
    }
}
