//! Coloured output: on a terminal, unless `NO_COLOR` is set (<https://no-color.org>).

use std::ffi::OsStr;
use std::io::IsTerminal as _;

/// A colour of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// No problem.
    Green,
    /// Needs attention.
    Yellow,
    /// An error.
    Red,
}

/// Whether standard output gets colours.
pub fn of_stdout() -> bool {
    let (no_colour, terminal) = (std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
    wanted(std::io::stdout().is_terminal(), no_colour.as_deref(), terminal.as_deref())
}

fn wanted(is_terminal: bool, no_colour: Option<&OsStr>, terminal: Option<&OsStr>) -> bool {
    is_terminal && no_colour.is_none_or(OsStr::is_empty) && terminal != Some(OsStr::new("dumb"))
}

/// Returns the text in this colour, or unchanged if colours are not wanted.
pub fn paint(text: &str, colour: Colour, with_colour: bool) -> String {
    if !with_colour {
        return text.to_owned();
    }
    let code = match colour {
        Colour::Green => 32,
        Colour::Yellow => 33,
        Colour::Red => 31,
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_a_dumb_terminal_and_no_color_have_none() {
        let set = |text: &'static str| Some(OsStr::new(text));
        assert!(
            wanted(true, None, set("xterm")) && wanted(true, set(""), None),
            "an empty NO_COLOR is not set"
        );
        assert!(!wanted(false, None, set("xterm")));
        assert!(!wanted(true, set("1"), set("xterm")));
        assert!(!wanted(true, None, set("dumb")));
    }

    #[test]
    fn without_colour_a_text_is_as_it_was() {
        assert_eq!(paint("x", Colour::Red, false), "x");
        assert_eq!(paint("x", Colour::Green, true), "\u{1b}[32mx\u{1b}[0m");
    }
}
